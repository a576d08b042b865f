"""A table for people: the verdicts, the published figures, ours with every seed, and what differs."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reproduction.experiment import Experiment
from reproduction.figures import Figure, Judged, arms_of, figures, judged, stand_ins
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
    """One key that two configurations give another value."""

    key: str  # such as `round.rounds`
    published: str  # its value in the published protocol, as text
    here: str  # its value in ours
    arms: tuple[str, ...] = ()  # names of the arms it is so for; empty for all of them


def differences(published: SimulationConfig, here: SimulationConfig) -> tuple[Difference, ...]:
    """The keys, sorted, that two configurations give another value, defaults included."""
    before = _flat(published)
    after = _flat(here)
    return tuple(
        Difference(key, before.get(key, _ABSENT), after.get(key, _ABSENT))
        for key in sorted(before.keys() | after.keys())
        if before.get(key, _ABSENT) != after.get(key, _ABSENT)
    )


def grouped(by_arm: Mapping[str, Sequence[Difference]]) -> tuple[Difference, ...]:
    """The differences of several arms, each once, sorted by key, with its arms.

    Without arms where it holds for all.
    """
    arms: dict[Difference, list[str]] = {}
    for arm, found in by_arm.items():
        for difference in found:
            arms.setdefault(difference, []).append(arm)
    return tuple(
        Difference(
            item.key,
            item.published,
            item.here,
            () if len(names) == len(by_arm) else tuple(names),
        )
        for item, names in sorted(arms.items(), key=lambda pair: (pair[0].key, pair[0].here))
    )


def _flat(config: SimulationConfig) -> dict[str, str]:
    return dict(_leaves(config.model_dump(mode="json", exclude={*HOW_COMPUTED, "seed"}), ""))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif path == "devices.types":
        yield path, _kinds(value)
    else:
        yield path, _text(value)


def _kinds(kinds: Sequence[Mapping[str, Any]]) -> str:
    """Kinds of devices, each by what is not its default."""
    words = []
    for kind in kinds:
        limits = [
            f"{key} {_text(kind[key])}"
            for key in ("max_width", "max_depth")
            if kind[key] not in (None, 1.0)
        ]
        words.append(
            f"{kind['count'] or 'the rest'} {kind['type']} at {_text(kind['link'])} {' '.join(limits)}".strip()
        )
    return "; ".join(words)


def _text(value: Any) -> str:
    if value is None:
        return _ABSENT
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    return (
        ", ".join(map(_text, value)) or _ABSENT if isinstance(value, (list, tuple)) else str(value)
    )


def as_markdown(
    experiment: Experiment,
    rows: Sequence[Row],
    *,
    plots: Sequence[str] = (),
    drawn: Collection[tuple[str, int]] = (),
) -> str:
    """The table with everything that belongs to it.

    Args:
        experiment: the table.
        rows: the figures of the complete runs at one scale, at least one; what was not run is not
            in the table.
        plots: names of plots that lie beside it.
        drawn: arms and seeds whose curves are stored, and plotted.
    """
    arms = list(dict.fromkeys(row.arm for row in rows))
    found = figures(experiment, rows)
    claims = [item for item in judged(experiment, rows) if item.by_seed]
    paper = f"Paper: <{experiment.url}>. " if experiment.url else ""
    parts = [
        f"# {experiment.title}",
        f"{paper}Scale: {rows[0].scale}. {len(arms)} of {len(experiment.arms)} arms run, which are in this table.",
        *(
            f"**{here} stands for {published}: published figures and claims are not about it.**"
            for published, here in stand_ins(experiment, arms_of(rows))
        ),
        *_claim_section("Verdicts", [item for item in claims if item.claim.says], _judging(rows)),
        "## Figures",
        _deciding(experiment, rows, found),
        *_further(experiment, rows),
        table_text([figure_cells(figure) for figure in found]),
        *_drawn(rows, drawn),
        *(f"![{name}]({name})" for name in plots),
        *_claim_section("Also compared", [item for item in claims if not item.claim.says]),
        "## Arms",
        "\n".join(f"- {arm}: {experiment.arm(arm).about}" for arm in arms),
        *_difference_section(experiment, rows),
        *(
            ("What no setting shows, at every scale:", _listed(experiment.notes))
            if experiment.notes
            else ()
        ),
        *_checked_section(experiment, rows),
        *_run_section(experiment, rows),
    ]
    return "\n\n".join(parts) + "\n"


def _judging(rows: Sequence[Row]) -> str:
    words = "By `ours` below, paired over the seeds: Student's interval of 95 % must lie beyond what is wanted."
    return f"{words} {stated_since(rows)}".rstrip()


def stated_since(rows: Sequence[Row]) -> str:
    """That runs are older than what judges them, empty where they are not."""
    runs = {(row.arm, row.seed): row for row in rows}
    before = sorted({arm for (arm, _), row in runs.items() if not row.stated})
    now = statement_of(rows)
    if before and not now:
        return "These runs are older than the statement of what is judged."
    words = (
        [f"Runs of {', '.join(before)} are older than the statement of what is judged."]
        if before
        else []
    )
    older = sorted({row.begun for row in runs.values() if row.begun not in {"", now}})
    if many := sum(row.begun in older for row in runs.values()):
        was = f"it was {', '.join(older)}, and is {now}"
        words.append(f"**What is stated was changed after {many} of the {len(runs)} runs: {was}.**")
    return " ".join(words)


def _deciding(experiment: Experiment, rows: Sequence[Row], found: Sequence[Figure]) -> str:
    count = experiment.decides[rows[0].scale]
    which = f"mean of the last {count} evaluations" if count > 1 else "last evaluation"
    words = f"`ours` is the {which}, or a figure that belongs to no round, such as a time."
    if count > 1 and (
        old := dict.fromkeys(figure.arm.name for figure in found if figure.last_alone)
    ):
        words += f" Of {', '.join(old)}, and in claims about them, it is the last one: no more was stored."
    return words


def _further(experiment: Experiment, rows: Sequence[Row]) -> Iterable[str]:
    named = experiment.seeds[rows[0].scale]
    if further := sorted({row.seed for row in rows} - {*named}):
        these, those = (", ".join(map(str, seeds)) for seeds in (named, further))
        yield f"Figures are of all seeds that were run, verdicts of the stated ones ({these}), not of {those}."


def _drawn(rows: Sequence[Row], drawn: Collection[tuple[str, int]]) -> Iterable[str]:
    runs = {(row.arm, row.seed) for row in rows}
    shown = len(runs.intersection(drawn))
    if 0 < shown < len(runs):
        yield f"The plots show {shown} of the {len(runs)} runs: those whose curves are stored, as they are now."


def _claim_section(title: str, items: Sequence[Judged], *words: str) -> Iterable[str]:
    if items:
        yield f"## {title}"
        yield from words
        unclaimed = () if items[0].claim.says else ("verdict", "wanted")
        yield table_text(
            [
                {key: text for key, text in claim_cells(i).items() if key not in unclaimed}
                for i in items
            ]
        )


def _checked_section(experiment: Experiment, rows: Sequence[Row]) -> Iterable[str]:
    if experiment.checked and rows[0].scale == "small":
        yield "## What was checked of the runs that Shoal publishes"
        yield "They are in `docs/results`, of this scale; others may come out otherwise."
        yield from experiment.checked


def _difference_section(experiment: Experiment, rows: Sequence[Row]) -> Iterable[str]:
    whole = "published protocol" if experiment.url else "whole one"
    yield f"## What differs from the {whole}"
    by_arm: dict[str, Sequence[Difference]] = {
        row.arm: differences(
            *(experiment.arm(row.arm).config(scale, row.seed) for scale in ("paper", row.scale))
        )
        for row in rows
    }
    found = grouped(by_arm)
    if not found:
        yield f"Computed from the configurations: nothing. This is the {whole}."
        return
    yield f"Computed from the configurations{'' if experiment.url else ' of the scale paper'}."
    cells = [
        (f"`{item.key}`", item.published, item.here, ", ".join(item.arms) or "all")
        for item in found
    ]
    yield table_text(
        [dict(zip(("setting", "published", "here", "arms"), line, strict=True)) for line in cells]
    )


def _run_section(experiment: Experiment, rows: Sequence[Row]) -> Iterable[str]:
    yield "## Runs"
    scale = rows[0].scale
    arms = dict.fromkeys(row.arm for row in rows)
    seeds = ",".join(str(seed) for seed in sorted({row.seed for row in rows}))
    only = (
        ""
        if set(arms) == {arm.name for arm in experiment.chosen(scale)}
        else f" --only {','.join(arms)}"
    )
    yield f"    shoal reproduce {experiment.table} --scale {scale} --seeds {seeds}{only}"
    runs = {(row.arm, row.seed): row for row in rows}
    with_time = any(row.unit == "h" for row in rows)
    yield table_text(
        [
            {
                "arm": row.arm,
                "seed": str(row.seed),
                "rounds": str(row.rounds),
                "real time": duration_text(row.seconds),
                **({"simulated time": duration_text(row.simulated_seconds)} if with_time else {}),
                "engine": row.engine,
            }
            for row in runs.values()
        ]
    )
    yield f"Real time of all rounds together: {duration_text(sum(row.seconds for row in runs.values()))}."
    yield _listed(dict.fromkeys(row.machine for row in rows))


def _listed(items: Iterable[str]) -> str:
    return "\n".join(f"- {item}" for item in items)
