"""A table for people: the published figure, ours with every seed, and what differs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from reproduction.differences import Difference, differences, grouped
from reproduction.experiment import Arm, Experiment, Scale
from reproduction.figures import Compared, Figure, Reached, compared, figures, reached, timed
from reproduction.report.cells import (
    MISSING,
    bound_text,
    duration_text,
    figure_cells,
    mean_signed,
    measure_title,
    seeds_text,
    signed_text,
    table_text,
)
from reproduction.running import ArmResult

__all__ = ["as_markdown"]


def as_markdown(
    experiment: Experiment, scale: Scale, results: Sequence[ArmResult], *, plots: Sequence[str] = ()
) -> str:
    """The table with everything that belongs to it.

    Args:
        experiment: the table.
        scale: at which scale it was run.
        results: the complete runs; what was not run is not in the table.
        plots: names of plots that lie beside it.
    """
    found = figures(results)
    arms = tuple(dict.fromkeys(result.arm for result in results))
    parts = [
        f"# {experiment.title}",
        f"Paper: <{experiment.paper}>. Scale: {scale}. {len(arms)} of {len(experiment.arms)} arms run"
        + (
            f"; the others are not in this table. {_remaining(experiment, arms)}"
            if len(arms) < len(experiment.arms)
            else "."
        ),
        *_data_warning(results),
        _figure_table(found),
        *(f"![{name}]({name})" for name in plots),
        *_comparison_section(compared(experiment, found)),
        *_milestone_section(reached(experiment, scale, results)),
        *_difference_section(scale, results),
        *_note_section(experiment),
        *_run_section(experiment, scale, results),
    ]
    return "\n\n".join(parts) + "\n"


def _remaining(experiment: Experiment, arms: Sequence[Arm]) -> str:
    left = [arm.name for arm in experiment.arms if arm not in arms]
    return f"Not run: {', '.join(left)}."


def _data_warning(results: Sequence[ArmResult]) -> Iterable[str]:
    """Whether any arm has other data than the paper's, which no published figure is about."""
    other = {
        (published, result.config.data.name)
        for result in results
        if (published := result.arm.config("paper", result.seed).data.name) != result.config.data.name
    }
    for published, here in sorted(other):
        yield f"**{here} stands for {published}: the published figures do not compare with ours.**"


def _figure_table(found: Sequence[Figure]) -> str:
    rows = [figure_cells(figure) for figure in found]
    return table_text(tuple(rows[0]), [tuple(row.values()) for row in rows])


def _comparison_section(items: Sequence[Compared]) -> Iterable[str]:
    if not items:
        return
    yield "## Compared, seed by seed"
    rows = []
    for item in items:
        comparison = item.comparison
        ratio = comparison.how == "over"
        sign = "/" if ratio else "-"
        rows.append(
            (
                f"{comparison.left} {sign} {comparison.right}",
                measure_title(item.measure),
                MISSING if item.published is None else signed_text(item.published, ratio=ratio),
                mean_signed(list(item.by_seed.values()), ratio=ratio),
                seeds_text({seed: signed_text(value, ratio=ratio) for seed, value in item.by_seed.items()}),
                bound_text(comparison.at_least, comparison.at_most),
                {None: MISSING, True: "yes", False: "no"}[item.holds],
            )
        )
    yield table_text(("arms", "figure", "published", "ours, mean", "by seed", "wanted", "holds"), rows)


def _milestone_section(items: Sequence[Reached]) -> Iterable[str]:
    if not items:
        return
    yield "## Reached by round"
    rows = [
        (
            item.milestone.arm,
            str(item.milestone.by_round),
            f"{item.milestone.at_least:g} %",
            seeds_text({seed: MISSING if v is None else f"{v:.2f} %" for seed, v in item.by_seed.items()}),
            "yes" if item.holds else "no",
        )
        for item in items
    ]
    yield table_text(("arm", "round", "wanted", "best until then, by seed", "holds"), rows)


def _difference_section(scale: Scale, results: Sequence[ArmResult]) -> Iterable[str]:
    yield "## What differs from the published protocol"
    by_arm: dict[str, Sequence[Difference]] = {
        result.arm.name: differences(result.arm.config("paper", result.seed), result.config) for result in results
    }
    found = grouped(by_arm)
    if not found:
        yield f"Computed from the configurations: nothing. Scale {scale} is the published protocol."
        return
    yield "Computed from the configurations."
    rows = [
        (f"`{item.key}`", item.published, item.here, ", ".join(item.arms) if item.arms else "all") for item in found
    ]
    yield table_text(("setting", "published", "here", "arms"), rows)


def _note_section(experiment: Experiment) -> Iterable[str]:
    if experiment.notes:
        yield "What no setting shows, at every scale:"
        yield "\n".join(f"- {note}" for note in experiment.notes)


def _run_section(experiment: Experiment, scale: Scale, results: Sequence[ArmResult]) -> Iterable[str]:
    yield "## Runs"
    arms = dict.fromkeys(result.arm.name for result in results)
    seeds = sorted({result.seed for result in results})
    default = {arm.name for arm in experiment.chosen(scale)}
    only = "" if set(arms) == default else f" --only {','.join(arms)}"
    yield f"    shoal reproduce {experiment.table} --scale {scale} --seeds {','.join(map(str, seeds))}{only}"
    with_time = timed(results)
    rows = [
        (
            result.arm.name,
            str(result.seed),
            str(len(result.rows)),
            duration_text(result.seconds),
            *([duration_text(result.rows[-1].simulated_total)] if with_time else []),
            f"{result.config.engine.kind}, {result.config.engine.backend}",
        )
        for result in results
    ]
    yield table_text(("arm", "seed", "rounds", "real time", *(["simulated time"] if with_time else []), "engine"), rows)
    yield f"Real time of all rounds together: {duration_text(sum(result.seconds for result in results))}."
    yield "\n".join(
        f"- {line}"
        for line in dict.fromkeys(
            f"{result.machine}; " + ", ".join(f"{name} {number}" for name, number in result.versions.items())
            for result in results
        )
    )
