"""Writes a table as Markdown: verdicts, published figures, ours by seed, and differences."""

from collections.abc import Collection, Iterable, Iterator, Sequence

from reproduction.claim_result import ClaimResult
from reproduction.experiment import Experiment
from reproduction.figures import Figures, Rows, arms_of, figures, judge, stand_ins
from reproduction.report.cells import (
    claim_cells,
    duration_text,
    figure_cells,
    size_cells,
    table_text,
)
from reproduction.report.differences import Difference, differences, grouped
from reproduction.stored import Row, statement_of

Results = Sequence[ClaimResult]
Paragraphs = Iterator[str]
Run = tuple[str, int]
"""Arm and seed."""


def as_markdown(
    experiment: Experiment,
    rows: Rows,
    *,
    plots: Sequence[str] = (),
    drawn: Collection[Run] = (),
) -> str:
    """Write the page of a table.

    Args:
        experiment: the table.
        rows: the figures of the complete runs at one scale, at least one; other runs are not in the
            table.
        plots: names of the plots beside the page.
        drawn: arms and seeds with stored and plotted curves.
    """
    claims: list[ClaimResult] = []
    comparisons: list[ClaimResult] = []
    for result in judge(experiment, rows):
        if result.by_seed and result.claim.says:
            claims.append(result)
        elif result.by_seed:
            comparisons.append(result)
    paragraphs = [
        *_head(experiment, rows),
        *_claim_section("Verdicts", claims, _judging(rows)),
        *_figure_section(experiment, rows),
        *_drawn(rows, drawn),
        *map("![{0}]({0})".format, plots),
        *_claim_section("Also compared", comparisons),
        *_arm_section(experiment, rows),
        *_difference_section(experiment, rows),
        *_note_section(experiment),
        *_checked_section(experiment, rows),
        *_run_section(experiment, rows),
    ]
    return "\n\n".join(paragraphs) + "\n"


def _head(experiment: Experiment, rows: Rows) -> Paragraphs:
    scale = rows[0].scale
    count = len(_arms(rows))
    total = len(experiment.arms)
    paper = ""
    if experiment.url:
        paper = f"Paper: <{experiment.url}>. "
    yield f"# {experiment.title}"
    yield f"{paper}Scale: {scale}. This page shows the {count} of {total} arms that were run."
    for published, here in stand_ins(experiment, arms_of(rows)):
        yield (
            f"**{here} stands for {published}: published figures and claims do not apply to it.**"
        )


def _judging(rows: Rows) -> str:
    words = (
        "The column `ours` decides each claim, in pairs of runs with the same seed: Student's 95 %"
        " confidence interval must be beyond the wanted value."
    )
    return f"{words} {stated_since(rows)}".rstrip()


def stated_since(rows: Rows) -> str:
    """Return a sentence about runs older than the statement of claims; empty if there are none."""
    now = statement_of(rows)
    runs = _runs(rows)
    unstated_arms: set[str] = set()
    earlier: list[str] = []
    for row in runs.values():
        if not row.stated:
            unstated_arms.add(row.arm)
        # The digest at the end of the run; if it differs, the statement changed after the run.
        if row.begun not in {"", now}:
            earlier.append(row.begun)
    unstated = sorted(unstated_arms)
    if unstated and not now:
        return "These runs are older than the statement of the claims."
    sentences: list[str] = []
    if unstated:
        sentences.append(
            f"Runs of {', '.join(unstated)} are older than the statement of the claims."
        )
    if earlier:
        statements = ", ".join(sorted(set(earlier)))
        change = f"it was {statements}, and is {now}"
        count = len(earlier)
        changed = f"{count} of the {len(runs)} runs"
        sentences.append(f"**The statement was changed after {changed}: {change}.**")
    return " ".join(sentences)


def _runs(rows: Rows) -> dict[Run, Row]:
    """Return one row of each run, by arm and seed."""
    runs: dict[Run, Row] = {}
    for row in rows:
        runs[row.arm, row.seed] = row
    return runs


def _arms(rows: Iterable[Row]) -> list[str]:
    """Return the names of the arms of rows, without repetition, in the order of the rows."""
    names = [row.arm for row in rows]
    # Unlike a set, a dictionary keeps the order.
    return list(dict.fromkeys(names))


def _figure_section(experiment: Experiment, rows: Rows) -> Paragraphs:
    shown = figures(experiment, rows)
    yield "## Figures"
    yield _deciding(experiment, rows, shown)
    yield from _further_seeds(experiment, rows)
    yield table_text(list(map(figure_cells, shown)))


def _deciding(
    experiment: Experiment,
    rows: Rows,
    shown: Figures,
) -> str:
    """Return a sentence about the deciding figure."""
    count = experiment.decides[rows[0].scale]
    decisive = "last evaluation"
    if count > 1:
        decisive = f"mean of the last {count} evaluations"
    words = f"`ours` is the {decisive}, or a figure that belongs to no round, such as a time."
    last_alone: list[str] = []
    for figure in shown:
        name = figure.arm.name
        if figure.last_alone and name not in last_alone:
            last_alone.append(name)
    if count > 1 and last_alone:
        words += (
            f" For {', '.join(last_alone)}, and for claims about these arms, it is the last"
            " evaluation, because no others were stored."
        )
    return words


def _further_seeds(experiment: Experiment, rows: Rows) -> Paragraphs:
    stated = experiment.seeds[rows[0].scale]
    further = set(_seeds(rows)) - set(stated)
    if further:
        stated_text = ", ".join(map(str, stated))
        further_text = ", ".join(map(str, sorted(further)))
        yield (
            "Figures cover all seeds that were run; verdicts use only the stated ones"
            f" ({stated_text}), not {further_text}."
        )


def _seeds(rows: Rows) -> list[int]:
    """Return the seeds of rows, sorted."""
    return sorted({row.seed for row in rows})


def _drawn(rows: Rows, drawn: Collection[Run]) -> Paragraphs:
    runs = _runs(rows).keys()
    total = len(runs)
    count = len(runs & set(drawn))
    if 0 < count < total:
        yield f"The plots show {count} of the {total} runs, because only these have stored curves."


def _claim_section(title: str, results: Results, *words: str) -> Paragraphs:
    if not results:
        return
    yield f"## {title}"
    yield from words
    lines: list[dict[str, str]] = []
    for result in results:
        cells = claim_cells(result)
        if not result.claim.says:
            del cells["verdict"]
            del cells["wanted"]
        lines.append(cells)
    yield table_text(lines)


def _arm_section(experiment: Experiment, rows: Rows) -> Paragraphs:
    yield "## Arms"
    lines = []
    for name in _arms(rows):
        arm = experiment.arm(name)
        lines.append(f"{name}: {arm.about}")
    yield _listed(lines)
    sizes = size_cells(rows)
    if sizes:
        yield (
            "Sizes are means over all updates: the number of parameters, the operations of a"
            " forward pass of one sample, and the space of the parameters in float32 (MiB)."
        )
        yield table_text(sizes)


def _note_section(experiment: Experiment) -> Paragraphs:
    if experiment.notes:
        if experiment.url:
            yield "At every scale, there are also differences that no setting shows:"
        else:
            yield "These notes apply at every scale:"
        yield _listed(experiment.notes)


def _checked_section(experiment: Experiment, rows: Rows) -> Paragraphs:
    # The checks are of the runs at this scale, and would be untrue beside others.
    if experiment.checked and rows[0].scale == "small":
        yield "## Checks of the published runs"
        yield (
            "The checked runs are those in `docs/results`, at this scale; other runs can give"
            " different results."
        )
        yield from experiment.checked


def _difference_section(experiment: Experiment, rows: Rows) -> Paragraphs:
    whole = "published protocol" if experiment.url else "scale `paper`"
    yield f"## Differences from the {whole}"
    by_arm: dict[str, Sequence[Difference]] = {}
    for row in rows:
        arm = experiment.arm(row.arm)
        published = arm.config("paper", row.seed)
        here = arm.config(row.scale, row.seed)
        # Seeds of an arm differ in nothing else, so it does not matter which row comes last.
        by_arm[row.arm] = differences(published, here)
    merged = grouped(by_arm)
    if not merged:
        yield f"The configurations show no difference from the {whole}."
        return
    yield "These differences are computed from the configurations."
    lines: list[dict[str, str]] = []
    for difference in merged:
        cells = {
            "setting": f"`{difference.key}`",
            "published": difference.published,
            "here": difference.here,
            "arms": ", ".join(difference.arms) or "all",
        }
        lines.append(cells)
    yield table_text(lines)


def _run_section(experiment: Experiment, rows: Rows) -> Paragraphs:
    """Yield the command that runs the table, and the times of its runs."""
    runs = _runs(rows)
    yield "## Runs"
    yield f"    {_command(experiment, rows)}"
    # Simulated time only matters where a figure is a time.
    with_time = "h" in {row.unit for row in rows}
    cells = []
    seconds = []
    for row in runs.values():
        cells.append(_run_cells(row, with_time=with_time))
        seconds.append(row.seconds)
    yield table_text(cells)
    yield f"Real time of all rounds together: {duration_text(sum(seconds))}."
    machines = [row.machine for row in rows]
    yield _listed(dict.fromkeys(machines))


def _command(experiment: Experiment, rows: Rows) -> str:
    scale = rows[0].scale
    arms = _arms(rows)
    seeds = ",".join(map(str, _seeds(rows)))
    command = f"shoal reproduce {experiment.table} --scale {scale} --seeds {seeds}"
    # A short command if it runs the same arms.
    default_arms = [arm.name for arm in experiment.chosen(scale)]
    if set(arms) == set(default_arms):
        return command
    return f"{command} --only {','.join(arms)}"


def _run_cells(row: Row, *, with_time: bool) -> dict[str, str]:
    cells = {
        "arm": row.arm,
        "seed": str(row.seed),
        "rounds": str(row.rounds),
        "real time": duration_text(row.seconds),
    }
    if with_time:
        cells["simulated time"] = duration_text(row.simulated_seconds)
    cells["engine"] = row.engine
    return cells


def _listed(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
