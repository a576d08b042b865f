"""Writes a table into a folder: figures, curves, Markdown and plots.

Files of an earlier statement are kept.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from pathlib import Path

from fleet_protocol.blob_store import write_atomically
from fleet_protocol.errors import ConfigError
from reproduction.claim_result import VERDICTS
from reproduction.experiment import Experiment, Scale, stated
from reproduction.figures import Rows, judge
from reproduction.report.cells import claim_cells, table_text
from reproduction.report.drawing import draw
from reproduction.report.markdown import as_markdown, stated_since
from reproduction.report.overview import PICTURE, chart, in_words
from reproduction.running import ArmResult
from reproduction.stored import (
    EARLIER,
    Point,
    Row,
    RowT,
    as_csv,
    points_of,
    read_points,
    read_rows,
    rows_of,
    statement_of,
)

CURVES = ".curves.csv"
"""Suffix of the file of a table's curves, from which the plots are drawn."""

StoredRows = tuple[Row, ...]
Group = tuple[str, list[Experiment]]
"""A paper, and its tables."""

_ABOUT = """# Results

This page judges every claim of the reproduced tables. `shoal reproduce --report` writes the \
page from the stored figures."""

_VERDICTS = """## Verdicts

Before a table is run, its file (`reproduction/tables`) states its claims, and for each claim the \
figure that decides it and the
statistical test. The deciding figure is the mean of the last evaluations, or a simulated time; \
for arms with a run that is
too old to have that mean, it is the last evaluation. Two arms are compared in pairs of runs with \
the same seed. The interval
is Student's 95 % confidence interval.

`needs` is the number of seeds that would decide a claim in 80 % of repetitions, if the difference \
were as large as
published and the spread at the upper end of its one-sided 80 % confidence interval, as Browne \
(1995) recommends. For three
seeds, that is 2.12 times the spread that they show. The time is that of the quickest stored run \
of each arm on two cores.

- `at least`: the seeds of this claim show no spread. The smallest spread of other claims about \
the same arms is used, or that of all comparable claims of the table.
- `longer runs`: an arm ended before its target, or at its best round, so no number of seeds \
decides the claim.
- `at the measured size`: nothing was published for this claim, so the difference is assumed to be \
as large as measured. \
The seeds that left the claim open also give the difference, so the figure is a hint and makes no \
claim `out of reach here`.
- For a claim that was not run, `needs` states the seeds of its table and their estimated time.
- `-`: the claim does not hold for the published figures, was decided without any, has only one \
seed, or the time of its runs is unknown.

| verdict | meaning |
| --- | --- |
| `holds` | the whole interval is beyond the wanted value |
| `does not hold` | the whole interval is on the other side |
| `undecided` | the interval contains the wanted value, seeds are missing, an arm never reached a \
target, or the data differ. \
`> 2.65` is a lower bound of a ratio of times: the slower arm had not reached the target when its \
run ended. `censored`: the best round of a run is its last, so a longer run might have a later \
best round |
| `out of reach here` | undecided or not run, and the seeds that would decide it need more than \
eight hours |
| `repeated` | undecided by this table's seeds; the table that `needs` names makes the same \
comparison with other or further seeds, and has its own verdict |
| `not run` | one of the arms has no stored figures, or the arms have no stated \
seed in common |

[Simulations](../simulation.md) explains how to run a table."""

_EARLIER_STATEMENTS = """## Appendix: earlier statements

When the claims or settings of a table change, its earlier figures are kept next to \
it, but they are no longer judged."""


def write_index(folder: Path, tables: Mapping[str, Experiment]) -> Path:
    """Write ``README.md`` from all tables, and the Markdown of each in the folder of its name.

    Beside it is a picture of the verdicts. Files of an earlier statement of a table are set aside,
    and not judged by the current one.

    Raises:
        DataError: a stored table is damaged.
        StorageError: if a file cannot be written.
    """
    rows_by_table: dict[str, StoredRows] = {}
    # All are read before any is written, so that a damaged file changes nothing.
    for name in tables:
        path = folder / name / f"{name}.csv"
        rows_by_table[name] = read_rows(path)
    for name, experiment in tables.items():
        rows = rows_by_table[name]
        # Rows of an earlier statement are dropped here, so that nothing below counts them.
        rows_by_table[name] = _write_again(experiment, rows, folder / name)
    papers = list(_by_paper(tables))
    counts = []
    for paper, group in papers:
        counts.append(_count_verdicts(paper, group, rows_by_table))
    picture = f"![Claims by paper and verdict]({PICTURE})"
    paragraphs = [_ABOUT, picture, in_words(counts), table_text(counts), _VERDICTS]
    for paper, group in papers:
        paragraphs.append(f"## {paper}")
        for experiment in group:
            name = experiment.table
            paragraphs += _summary(experiment, rows_by_table[name])
    paragraphs += _earlier_statements(tables, folder)
    text = "\n\n".join(paragraphs) + "\n"
    path = folder / "README.md"
    write_atomically(path, text.encode())
    write_atomically(folder / PICTURE, chart(counts).encode())
    return path


def _write_again(
    experiment: Experiment,
    rows: StoredRows,
    folder: Path,
) -> StoredRows:
    """Write the files of a table from its rows; return the rows of the current statement."""
    statement = statement_of(rows)
    # Rows that are older than any statement stay; the page names their runs.
    if statement and statement != stated(experiment, rows[0].scale):
        keep_earlier(folder, experiment.table)
        return ()
    if rows:
        write_rows(experiment, rows, folder)
    return rows


def _by_paper(tables: Mapping[str, Experiment]) -> Iterator[Group]:
    # Tables of one paper are neighbours, because tables are sorted by section.
    for paper, group in groupby(tables.values(), _paper_of):
        yield paper, list(group)


def _paper_of(experiment: Experiment) -> str:
    """Return the paper of a table, with which its title begins."""
    paper, _, _ = experiment.title.partition(",")
    return paper


def _count_verdicts(
    paper: str,
    group: Sequence[Experiment],
    rows_by_table: Mapping[str, Rows],
) -> dict[str, str]:
    verdicts = Counter[str]()
    for experiment in group:
        for result in judge(experiment, rows_by_table[experiment.table]):
            verdicts[result.verdict] += 1
    cells = {"claims of": paper}
    for verdict in VERDICTS:
        cells[verdict] = str(verdicts[verdict])
    return cells


def _summary(experiment: Experiment, rows: Rows) -> Iterator[str]:
    """Yield the paragraphs of a table on the page of all tables."""
    _, _, title = experiment.title.partition(", ")
    capital = title[0].upper()
    yield f"### {capital}{title[1:]}"
    yield " ".join(_run_sentences(experiment, rows))
    claims: list[dict[str, str]] = []
    for result in judge(experiment, rows):
        if result.claim.says:
            claims.append(claim_cells(result))
    if claims:
        yield table_text(claims)
    else:
        yield "This table makes no claims; its page lists the figures."
    # As on the page of the table, for runs at this scale.
    if rows and rows[0].scale == "small":
        yield from experiment.checked


def _run_sentences(experiment: Experiment, rows: Rows) -> Iterator[str]:
    """Yield which arms of a table were run, and the link to its page."""
    name = experiment.table
    if rows:
        extent = _extent(experiment, rows)
        yield f"[{name}]({name}/{name}.md): {extent}."
        since = stated_since(rows)
        if since:
            yield since
    else:
        yield f"`{name}`: not run."


def _earlier_statements(tables: Iterable[str], folder: Path) -> list[str]:
    """Return the appendix with links to figures of earlier statements; empty without any."""
    lines: list[str] = []
    for name in tables:
        links: list[str] = []
        own_folder = folder / name
        for path in sorted(own_folder.glob(f"{EARLIER}*")):
            earlier = path.name
            links.append(f"[{earlier}]({name}/{earlier}/{name}.md)")
        if links:
            lines.append(f"- `{name}`: {', '.join(links)}")
    if not lines:
        return []
    return [_EARLIER_STATEMENTS, "\n".join(lines)]


def _extent(experiment: Experiment, rows: Rows) -> str:
    """Return the scale of a table's rows, and how much of the table they are."""
    arms: set[str] = set()
    runs: set[tuple[str, int]] = set()
    for row in rows:
        arms.add(row.arm)
        runs.add((row.arm, row.seed))
    total = len(experiment.arms)
    share = f"{len(arms)} of {total} arms"
    scale = rows[0].scale
    return f"scale {scale}, {share}, {len(runs)} runs"


@dataclass(frozen=True)
class WrittenTable:
    """The files of a table (Markdown, figures, curves and plots), and the figures."""

    paths: tuple[Path, ...]
    rows: StoredRows


def write_table(
    experiment: Experiment,
    scale: Scale,
    results: Sequence[ArmResult],
    folder: Path,
) -> WrittenTable:
    """Add the figures of complete runs, at least one, to the existing ones.

    Existing figures stay if the table's statement has not changed, or if they are older than any
    statement; the page names those. If their curves were not stored, their page is set aside with
    its plots.

    Raises:
        ConfigError: figures of another scale exist.
        StorageError: if a file cannot be written.
    """
    curves = folder / f"{experiment.table}{CURVES}"
    # A repeated run replaces the earlier one.
    rows: dict[tuple[str, int, str], Row] = {}
    # Before the curves are read: files that new ones replace are set aside with their curves.
    kept = _rows_to_keep(experiment, scale, folder)
    for row in (*kept, *rows_of(experiment, scale, results)):
        rows[row.arm, row.seed, row.figure] = row
    points: dict[tuple[str, int, int], Point] = {}
    for point in (*read_points(curves), *points_of(results)):
        points[point.arm, point.seed, point.round] = point
    ordered = _in_order(experiment, points.values())
    write_atomically(curves, as_csv(ordered, Point).encode())
    return write_rows(experiment, tuple(rows.values()), folder)


def _rows_to_keep(
    experiment: Experiment,
    scale: Scale,
    folder: Path,
) -> StoredRows:
    """Read the existing figures that stay; set aside files that new ones would replace.

    Raises:
        ConfigError: figures of another scale exist.
    """
    rows = read_rows(folder / f"{experiment.table}.csv")
    if not rows:
        return ()
    if rows[0].scale != scale:
        raise ConfigError(
            f"{folder} has this table at scale {rows[0].scale}; name another folder for {scale}"
        )
    statement = statement_of(rows)
    is_current = statement in {"", stated(experiment, scale)}
    curves = folder / f"{experiment.table}{CURVES}"
    has_curves = curves.exists()
    # Without curves, the plots could not be drawn again.
    if not is_current or not has_curves:
        keep_earlier(folder, experiment.table)
    return rows if is_current else ()


def write_rows(
    experiment: Experiment,
    rows: Rows,
    folder: Path,
) -> WrittenTable:
    """Write a table from its figures and curves, with existing older plots.

    Raises:
        StorageError: if a file cannot be written.
    """
    ordered = _in_order(experiment, rows)
    curves = folder / f"{experiment.table}{CURVES}"
    points = read_points(curves)
    draw(experiment, rows[0].scale, points, folder)
    drawn = {(point.arm, point.seed) for point in points}
    plots = sorted(folder.glob(f"{experiment.table}-*.png"))
    names = [path.name for path in plots]
    table = folder / f"{experiment.table}.csv"
    write_atomically(table, as_csv(ordered).encode())
    text = as_markdown(
        experiment,
        ordered,
        plots=names,
        drawn=drawn,
    )
    markdown = folder / f"{experiment.table}.md"
    write_atomically(markdown, text.encode())
    paths = [markdown, table]
    if drawn:
        paths.append(curves)
    paths += plots
    return WrittenTable(tuple(paths), ordered)


def keep_earlier(folder: Path, table: str) -> None:
    """Set a table's files aside, into a new folder with the next number.

    Args:
        folder: where the files are.
        table: name of the table.
    """
    for number in count(1):
        earlier = folder / f"{EARLIER}{number}"
        if not earlier.exists():
            break
    earlier.mkdir()
    # Two patterns, because `name*` would also find tables whose names begin with this one.
    files = [*folder.glob(f"{table}.*")]
    plots = [*folder.glob(f"{table}-*.png")]
    for path in files + plots:
        path.replace(earlier / path.name)


def _in_order(experiment: Experiment, rows: Iterable[RowT]) -> tuple[RowT, ...]:
    """Sort rows by arm and seed; rows with the same stay in their order.

    Rows of arms that the table no longer has are omitted.
    """
    rows_by_arm: dict[str, list[RowT]] = {}
    for row in rows:
        rows_by_arm.setdefault(row.arm, []).append(row)
    ordered: list[RowT] = []
    for arm in experiment.arms:
        rows_of_arm = rows_by_arm.get(arm.name, ())
        ordered += sorted(rows_of_arm, key=lambda row: row.seed)
    return tuple(ordered)
