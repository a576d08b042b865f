"""Write a table as Markdown: verdicts, published figures, ours with every seed, and differences."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reproduction.experiment import Experiment
from reproduction.figures import ClaimResult, Figure, arms_of, figures, judge, stand_ins
from reproduction.report.cells import (
    claim_cells,
    duration_text,
    figure_cells,
    table_text,
)
from reproduction.stored import Row, statement_of
from simulation.settings import HOW_COMPUTED, SimulationConfig

_ABSENT = "none"


@dataclass(frozen=True)
class Difference:
    """One key that has another value in each of two configurations."""

    key: str  # such as `round.rounds`
    published: str  # its value in the published protocol, as text
    here: str  # its value in ours
    arms: tuple[str, ...] = ()  # names of the arms that have it; empty for all of them


def differences(published: SimulationConfig, here: SimulationConfig) -> tuple[Difference, ...]:
    """Return the keys, sorted, whose values differ in two configurations, defaults included."""
    before = _flat(published)
    after = _flat(here)
    differing: list[Difference] = []
    for key in sorted(before.keys() | after.keys()):
        old = before.get(key, _ABSENT)
        new = after.get(key, _ABSENT)
        if old != new:
            differing.append(Difference(key, old, new))
    return tuple(differing)


def grouped(by_arm: Mapping[str, Sequence[Difference]]) -> tuple[Difference, ...]:
    """Return the differences of several arms, each once with its arms, sorted by key.

    A difference that all arms have is without arms.
    """
    arms: dict[Difference, list[str]] = {}
    for arm, differing in by_arm.items():
        for difference in differing:
            arms.setdefault(difference, []).append(arm)
    merged: list[Difference] = []
    for difference in sorted(arms, key=lambda difference: (difference.key, difference.here)):
        names = arms[difference]
        if len(names) == len(by_arm):
            names = []
        merged.append(replace(difference, arms=tuple(names)))
    return tuple(merged)


def _flat(config: SimulationConfig) -> dict[str, str]:
    """Return the settings of a configuration as texts, by key such as `round.rounds`."""
    settings = config.model_dump(mode="json", exclude={*HOW_COMPUTED, "seed"})
    return dict(_values(settings, ""))


def _values(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _values(entry, f"{path}.{key}" if path else str(key))
    elif path == "devices.types":
        yield path, _kinds(value)
    else:
        yield path, _text(value)


def _kinds(kinds: Sequence[Mapping[str, Any]]) -> str:
    """Describe kinds of devices by what differs from the defaults."""
    descriptions: list[str] = []
    for kind in kinds:
        words = [str(kind["count"] or "the rest"), kind["type"], "at", _text(kind["link"])]
        for key in ("max_width", "max_depth"):
            if kind[key] not in (None, 1.0):
                words.append(f"{key} {_text(kind[key])}")
        descriptions.append(" ".join(words))
    return "; ".join(descriptions)


def _text(value: Any) -> str:
    if value is None:
        return _ABSENT
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text, value)) or _ABSENT
    return str(value)


def as_markdown(
    experiment: Experiment,
    rows: Sequence[Row],
    *,
    plots: Sequence[str] = (),
    drawn: Collection[tuple[str, int]] = (),
) -> str:
    """Write the table with everything that belongs to it.

    Args:
        experiment: the table.
        rows: the figures of the complete runs at one scale, at least one; what was not run is not
            in the table.
        plots: names of plots that are beside it.
        drawn: arms and seeds whose curves are stored, and plotted.
    """
    claims: list[ClaimResult] = []
    comparisons: list[ClaimResult] = []
    for result in judge(experiment, rows):
        if result.by_seed:
            kind = claims if result.claim.says else comparisons
            kind.append(result)
    paragraphs = [
        *_head(experiment, rows),
        *_claim_section("Verdicts", claims, _judging(rows)),
        *_figure_section(experiment, rows),
        *_drawn(rows, drawn),
        *(f"![{name}]({name})" for name in plots),
        *_claim_section("Also compared", comparisons),
        *_arm_section(experiment, rows),
        *_difference_section(experiment, rows),
        *_note_section(experiment),
        *_checked_section(experiment, rows),
        *_run_section(experiment, rows),
    ]
    return "\n\n".join(paragraphs) + "\n"


def _head(experiment: Experiment, rows: Sequence[Row]) -> Iterator[str]:
    arms = _arms(rows)
    paper = f"Paper: <{experiment.url}>. " if experiment.url else ""
    yield f"# {experiment.title}"
    yield (
        f"{paper}Scale: {rows[0].scale}. {len(arms)} of {len(experiment.arms)} arms run, which are "
        "in this table."
    )
    for published, here in stand_ins(experiment, arms_of(rows)):
        yield (f"**{here} stands for {published}: published figures and claims are not about it.**")


def _judging(rows: Sequence[Row]) -> str:
    words = (
        "By `ours` below, paired over the seeds: Student's interval of 95 % must lie beyond what "
        "is wanted."
    )
    return f"{words} {stated_since(rows)}".rstrip()


def stated_since(rows: Sequence[Row]) -> str:
    """Say which runs are older than the statement that judges them; empty if none is."""
    now = statement_of(rows)
    runs = _runs(rows)
    unstated_arms: set[str] = set()
    earlier: list[str] = []
    for row in runs.values():
        if not row.stated:
            unstated_arms.add(row.arm)
        if row.begun not in {"", now}:
            earlier.append(row.begun)
    unstated = sorted(unstated_arms)
    if unstated and not now:
        return "These runs are older than the statement of what is judged."
    sentences: list[str] = []
    if unstated:
        sentences.append(
            f"Runs of {', '.join(unstated)} are older than the statement of what is judged."
        )
    if earlier:
        change = f"it was {', '.join(sorted(set(earlier)))}, and is {now}"
        changed = f"{len(earlier)} of the {len(runs)} runs"
        sentences.append(f"**What is stated was changed after {changed}: {change}.**")
    return " ".join(sentences)


def _runs(rows: Sequence[Row]) -> dict[tuple[str, int], Row]:
    """Return one row of each run, by arm and seed."""
    return {(row.arm, row.seed): row for row in rows}


def _arms(rows: Iterable[Row]) -> list[str]:
    """Return the names of the arms of rows, each once, in the order of the rows."""
    return list(dict.fromkeys(row.arm for row in rows))


def _figure_section(experiment: Experiment, rows: Sequence[Row]) -> Iterator[str]:
    shown = figures(experiment, rows)
    yield "## Figures"
    yield _deciding(experiment, rows, shown)
    yield from _further_seeds(experiment, rows)
    yield table_text([figure_cells(figure) for figure in shown])


def _deciding(experiment: Experiment, rows: Sequence[Row], shown: Sequence[Figure]) -> str:
    """Say which figure decides."""
    count = experiment.decides[rows[0].scale]
    decisive = f"mean of the last {count} evaluations" if count > 1 else "last evaluation"
    words = f"`ours` is the {decisive}, or a figure that belongs to no round, such as a time."
    last_alone: list[str] = []
    for figure in shown:
        if figure.last_alone and figure.arm.name not in last_alone:
            last_alone.append(figure.arm.name)
    if count > 1 and last_alone:
        words += (
            f" Of {', '.join(last_alone)}, and in claims about them, it is the last one: no more "
            "was stored."
        )
    return words


def _further_seeds(experiment: Experiment, rows: Sequence[Row]) -> Iterator[str]:
    stated = experiment.seeds[rows[0].scale]
    further = sorted({*_seeds(rows)} - {*stated})
    if further:
        stated_text = ", ".join(map(str, stated))
        further_text = ", ".join(map(str, further))
        yield (
            f"Figures are of all seeds that were run, verdicts of the stated ones ({stated_text}), "
            f"not of {further_text}."
        )


def _seeds(rows: Sequence[Row]) -> list[int]:
    """Return the seeds of rows, sorted."""
    return sorted({row.seed for row in rows})


def _drawn(rows: Sequence[Row], drawn: Collection[tuple[str, int]]) -> Iterator[str]:
    runs = _runs(rows).keys()
    count = len(runs & set(drawn))
    if 0 < count < len(runs):
        yield (
            f"The plots show {count} of the {len(runs)} runs: those whose curves are stored, as "
            "they are now."
        )


def _claim_section(title: str, results: Sequence[ClaimResult], *words: str) -> Iterator[str]:
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


def _arm_section(experiment: Experiment, rows: Sequence[Row]) -> Iterator[str]:
    yield "## Arms"
    yield _listed(f"{arm}: {experiment.arm(arm).about}" for arm in _arms(rows))


def _note_section(experiment: Experiment) -> Iterator[str]:
    if experiment.notes:
        yield "What no setting shows, at every scale:"
        yield _listed(experiment.notes)


def _checked_section(experiment: Experiment, rows: Sequence[Row]) -> Iterator[str]:
    if experiment.checked and rows[0].scale == "small":
        yield "## What was checked of the runs that Shoal publishes"
        yield "They are in `docs/results`, of this scale; others may come out otherwise."
        yield from experiment.checked


def _difference_section(experiment: Experiment, rows: Sequence[Row]) -> Iterator[str]:
    whole = "published protocol" if experiment.url else "whole one"
    yield f"## What differs from the {whole}"
    by_arm: dict[str, Sequence[Difference]] = {}
    for row in rows:
        arm = experiment.arm(row.arm)
        published = arm.config("paper", row.seed)
        by_arm[row.arm] = differences(published, arm.config(row.scale, row.seed))
    merged = grouped(by_arm)
    if not merged:
        yield f"Computed from the configurations: nothing. This is the {whole}."
        return
    yield f"Computed from the configurations{'' if experiment.url else ' of the scale paper'}."
    lines: list[dict[str, str]] = []
    for difference in merged:
        lines.append(
            {
                "setting": f"`{difference.key}`",
                "published": difference.published,
                "here": difference.here,
                "arms": ", ".join(difference.arms) or "all",
            }
        )
    yield table_text(lines)


def _run_section(experiment: Experiment, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the command that runs the table, and the time of each run."""
    runs = _runs(rows)
    yield "## Runs"
    yield f"    {_command(experiment, rows)}"
    with_time = any(row.unit == "h" for row in rows)
    yield table_text([_run_cells(row, with_time=with_time) for row in runs.values()])
    total = duration_text(sum(row.seconds for row in runs.values()))
    yield f"Real time of all rounds together: {total}."
    yield _listed(dict.fromkeys(row.machine for row in rows))


def _command(experiment: Experiment, rows: Sequence[Row]) -> str:
    scale = rows[0].scale
    arms = _arms(rows)
    seeds = ",".join(map(str, _seeds(rows)))
    command = f"shoal reproduce {experiment.table} --scale {scale} --seeds {seeds}"
    if set(arms) == {arm.name for arm in experiment.chosen(scale)}:
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
