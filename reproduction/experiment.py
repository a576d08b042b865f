"""What an experiment is: a table of a paper as arms, each of which is a simulation's configuration at three scales.

``paper`` is the published protocol. ``small`` takes less than two hours on two cores for the arms that run by default,
``smoke`` minutes. An arm describes all three as plain tables of ``sim.toml``, so that what differs between them is
computed from the configurations and never written by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from fleet_protocol.errors import ConfigError
from fleet_protocol.spelling import closest
from reproduction.measures import Measure
from reproduction.tables.published import Published
from simulation.settings import SimulationConfig

__all__ = ["SCALES", "Arm", "Comparison", "Experiment", "Milestone", "Scale", "Settings", "merged", "suggestion"]

Scale = Literal["smoke", "small", "paper"]
SCALES: tuple[Scale, ...] = get_args(Scale)

Settings = Mapping[str, Any]
"""Tables of ``sim.toml`` as plain values, without what a run adds: seed, folders and engine."""


def merged(*layers: Settings) -> dict[str, Any]:
    """Join settings; of two values for one key the later counts, tables are joined in turn.

    Args:
        layers: from the most general to the most special.

    Returns:
        New settings; a table that is joined is new, too.
    """
    whole: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            before = whole.get(key)
            whole[key] = merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return whole


@dataclass(frozen=True, eq=False)
class Arm:
    """One row of a table for one data set and split: what is trained once for each seed.

    Attributes:
        name: unique in its table, such as ``a-e/iid``.
        about: for people, one line.
        measures: the figures that are read from it.
        published: what the paper prints, by name of the measure; what is missing was not published.
        settings: the tables of ``sim.toml`` at a scale.
    """

    name: str
    about: str
    measures: tuple[Measure, ...]
    settings: Callable[[Scale], Settings]
    published: Mapping[str, Published] = field(default_factory=dict)

    def config(self, scale: Scale, seed: int, **run: Any) -> SimulationConfig:
        """The configuration of one run.

        Args:
            scale: at which scale.
            seed: of the run.
            run: what does not belong to the experiment: ``out``, ``cache``, ``keep_versions``, ``engine``.
        """
        return SimulationConfig.model_validate(merged(self.settings(scale), {"seed": seed, **run}))

    @property
    def folder(self) -> str:
        """Its name as part of a path."""
        return self.name.replace("/", "--").replace(":", "-")


@dataclass(frozen=True)
class Comparison:
    """One arm against another, seed by seed: what a table is there to show.

    Attributes:
        left: name of an arm.
        right: name of the arm it is compared with.
        measure: name of a measure that both have.
        how: ``minus`` for the difference, ``over`` for the ratio.
        at_least: what the mean must be at least to show what the paper shows; None for no such bound.
        at_most: what it must be at most.
    """

    left: str
    right: str
    measure: str
    how: Literal["minus", "over"] = "minus"
    at_least: float | None = None
    at_most: float | None = None

    def value(self, left: float, right: float) -> float:
        """The comparison of two figures."""
        return left - right if self.how == "minus" else left / right


@dataclass(frozen=True)
class Milestone:
    """An accuracy that an arm must have reached by a round.

    Attributes:
        arm: name of an arm.
        by_round: the round.
        at_least: global accuracy, in %.
    """

    arm: str
    by_round: int
    at_least: float


@dataclass(frozen=True)
class Experiment:
    """A table of a paper.

    Attributes:
        table: its name on the command line.
        title: for people.
        paper: URL.
        arms: all of them, in the order of the table.
        seeds: that are run at each scale if nobody names others.
        selected: names of the arms that are run at a scale if nobody names others; scales that are missing run all.
        comparisons: what the table is there to show.
        milestones: accuracies to reach, by scale.
        notes: what differs from the paper at every scale and cannot be seen in a configuration.
    """

    table: str
    title: str
    paper: str
    arms: tuple[Arm, ...]
    seeds: Mapping[Scale, tuple[int, ...]]
    selected: Mapping[Scale, tuple[str, ...]] = field(default_factory=dict)
    comparisons: tuple[Comparison, ...] = ()
    milestones: Mapping[Scale, tuple[Milestone, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def arm(self, name: str) -> Arm:
        """An arm by its name.

        Raises:
            ConfigError: there is none of this name; the message names the closest one.
        """
        for arm in self.arms:
            if arm.name == name:
                return arm
        names = [arm.name for arm in self.arms]
        raise ConfigError(f"table {self.table} has no arm {name!r}{suggestion(name, names)}")

    def chosen(self, scale: Scale, only: Sequence[str] = ()) -> tuple[Arm, ...]:
        """The arms to run, in the order of the table.

        Args:
            scale: at which scale.
            only: names of arms; the scale's own selection if empty.

        Raises:
            ConfigError: an arm is unknown.
        """
        wanted = {self.arm(name).name for name in only or self.selected.get(scale, ())}
        return tuple(arm for arm in self.arms if not wanted or arm.name in wanted)


def suggestion(name: str, known: Iterable[str]) -> str:
    """What to say of an unknown name: the closest known one, or all of them."""
    names = list(known)
    close = closest(name, names, cutoff=0.5)
    return f"; did you mean {close!r}?" if close else f"; there are {', '.join(names)}"
