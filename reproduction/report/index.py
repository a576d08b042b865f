"""The page of all tables: one line for each claim of each paper with its verdict, from the stored figures alone."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from fleet_protocol.blob_store import write_atomically
from reproduction.experiment import Experiment, stated
from reproduction.figures import VERDICTS, judged
from reproduction.report.cells import claim_cells, table_text
from reproduction.report.markdown import stated_since
from reproduction.report.writing import keep_earlier, write_rows
from reproduction.stored import EARLIER, Row, read_rows, statement_of

_ABOUT = """# What we ran

Every claim of the papers' tables, as `shoal reproduce --report` wrote this page from the figures stored beside it. What
is claimed, what decides and how it is tested stands in the table's file (`reproduction/tables`) before it is run: the
mean of the last evaluations (of arms with a run that is too old to have it the last one), or a simulated time; paired
over the seeds; Student's interval of 95 %.

- `holds`: all of the interval is beyond what is wanted; `does not hold`: all of it is on the other side.
- `undecided`: neither, or not all of the stated seeds, or a target that one of the two never reached, or other data.
  `> 2.65` is what is known of a ratio of times then: the first had not reached it when its run ended.
- `not run`: nothing is stored of one of the two, or they share no stated seed; other seeds stand in the table alone.

How to run a table is in [simulation](../simulation.md)."""


def write_index(folder: Path, tables: Mapping[str, Experiment]) -> Path:
    """Write every table's Markdown again, in the folder of its name, and ``README.md`` from all of them.

    What was written when a table stated something else is set aside as it is, and not judged by what is stated now.

    Raises:
        DataError: a stored table is damaged.
        StorageError: a file cannot be written.
    """
    found = {name: read_rows(folder / name / f"{name}.csv") for name in tables}
    for name, rows in found.items():
        then = statement_of(rows)
        if then and then != stated(tables[name], rows[0].scale):
            keep_earlier(folder / name, name, then)
            found[name] = ()
        elif rows:
            write_rows(tables[name], rows, folder / name)
    parts = [_ABOUT, table_text([_counts(paper, group, found) for paper, group in _by_paper(tables)])]
    for paper, group in _by_paper(tables):
        parts.append(f"## {paper}")
        for experiment in group:
            parts += _table(experiment, found[experiment.table], folder / experiment.table)
    path = folder / "README.md"
    write_atomically(path, ("\n\n".join(parts) + "\n").encode())
    return path


def _by_paper(tables: Mapping[str, Experiment]) -> Iterator[tuple[str, list[Experiment]]]:
    for paper, group in groupby(tables.values(), key=lambda table: table.title.partition(",")[0]):
        yield paper, list(group)


def _counts(paper: str, group: Sequence[Experiment], found: Mapping[str, Sequence[Row]]) -> dict[str, str]:
    verdicts = Counter(item.verdict for table in group for item in judged(table, found[table.table]))
    return {"claims of": paper, **{word: str(verdicts[word]) for word in VERDICTS}}


def _table(experiment: Experiment, rows: Sequence[Row], folder: Path) -> Iterator[str]:
    name, title = experiment.table, experiment.title.partition(", ")[2]
    yield f"### {title[0].upper()}{title[1:]}"
    earlier = [f"[{path.name}]({name}/{path.name}/{name}.md)" for path in sorted(folder.glob(f"{EARLIER}*"))]
    words = [f"`{name}`: not run."]
    if rows:
        runs = {(row.arm, row.seed) for row in rows}
        arms = f"{len({arm for arm, _ in runs})} of {len(experiment.arms)} arms"
        words = [f"[{name}]({name}/{name}.md): scale {rows[0].scale}, {arms}, {len(runs)} runs."]
        words += [since] if (since := stated_since(rows)) else []
    yield " ".join([*words, *([f"Earlier, when something else was stated: {', '.join(earlier)}."] if earlier else [])])
    items = [claim_cells(item) for item in judged(experiment, rows) if item.claim.says]
    yield table_text(items) if items else "Nothing is claimed of it; its figures stand beside the others."
    yield from experiment.checked if rows and rows[0].scale == "small" else ()
