"""Describe an experiment: a table of a paper, whose arms are configurations of simulations.

Every arm has a configuration at each of three scales.

``paper`` is the published protocol. ``small`` takes less than two hours a seed on two cores for the
arms that run by default, ``smoke`` minutes. An arm describes all three as plain tables of
``sim.toml``, so that what differs between them is computed from the configurations and never
written by hand.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from fleet_protocol.configuration import validate_config
from fleet_protocol.errors import ConfigError
from fleet_protocol.spelling import closest
from reproduction.measures import Measure
from reproduction.published import Published
from simulation.settings import SimulationConfig

Scale = Literal["smoke", "small", "paper"]
SCALES: tuple[Scale, ...] = get_args(Scale)

Settings = Mapping[str, Any]
"""Tables of ``sim.toml`` as plain values, without what a run adds: seed, folders and engine."""


def merged(*layers: Settings) -> dict[str, Any]:
    """Join settings, from the most general to the most special, into new ones.

    Of two values for one key the later counts; tables are joined in turn.
    """
    settings: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            earlier = settings.get(key, {})
            are_tables = isinstance(earlier, Mapping) and isinstance(value, Mapping)
            settings[key] = merged(earlier, value) if are_tables else value
    return settings


@dataclass(frozen=True, eq=False)
class Arm:
    """One row of a table for one data set and split: what is trained once for each seed.

    Attributes:
        name: unique in its table, such as ``a-e/iid``.
        about: for people, one line.
        settings: the tables of ``sim.toml`` at a scale.
        published: what the paper prints, by name of the measure; what is missing was not published.
    """

    name: str
    about: str
    measures: tuple[Measure, ...]
    settings: Callable[[Scale], Settings]
    published: Mapping[str, Published]

    def config(self, scale: Scale, seed: int, **run: Any) -> SimulationConfig:
        """Return the configuration of a run.

        Args:
            scale: of the run.
            seed: of the run.
            run: ``out``, ``cache`` and all else that does not belong to the table.

        Raises:
            ConfigError: the settings are not those of a simulation.
        """
        settings = merged(self.settings(scale), {"seed": seed, **run})
        source = f"arm {self.name} with seed {seed}"
        return validate_config(settings, SimulationConfig, source=source)

    @property
    def folder(self) -> str:
        """The name of the arm as part of a path."""
        name = self.name.replace("/", "--")
        return name.replace(":", "-")


@dataclass(frozen=True)
class Claim:
    """A claim of a table about one arm against another seed by seed, or about one arm alone.

    Attributes:
        says: the claim in a sentence; empty for a comparison that is printed, and of which nothing
            is claimed.
        left: name of an arm.
        right: name of the arm it is compared with; empty for none.
        measure: name of a measure that both have.
        how: ``minus`` for the difference, ``over`` for the ratio.
        at_least: the bound that the figure must be above for the claim to hold; None for no such
            bound.
        at_most: that it must be below.
    """

    says: str
    left: str
    right: str
    measure: str
    how: Literal["minus", "over"]
    at_least: float | None
    at_most: float | None

    def value(self, left: float, right: float) -> float:
        """Compare two figures."""
        if self.how == "minus":
            return left - right
        return left / right


@dataclass(frozen=True)
class Experiment:
    """A table of a paper.

    Attributes:
        table: its name on the command line.
        title: for people.
        url: of the paper.
        section: of the specification, which describes the method.
        rank: its place where all tables are run; the headline ones come first.
        arms: all of them, in the order of the table.
        seeds: that are run at each scale if nobody names others.
        decides: how many of the last evaluations are averaged to the figure that decides, by scale.
        selected: names of the arms that are run at a scale if nobody names others; scales that are
            missing run all.
        claims: what the table is there to show, stated before it is run.
        notes: what differs from the paper at every scale and cannot be seen in a configuration.
        checked: what was checked where a claim does not hold, a paragraph or list each.
    """

    table: str
    title: str
    url: str
    section: int
    rank: int
    arms: tuple[Arm, ...]
    seeds: Mapping[Scale, tuple[int, ...]]
    decides: Mapping[Scale, int]
    selected: Mapping[Scale, tuple[str, ...]]
    claims: tuple[Claim, ...]
    notes: tuple[str, ...]
    checked: tuple[str, ...]

    def arm(self, name: str) -> Arm:
        """Return an arm by its name.

        Raises:
            ConfigError: there is none of this name; the message names the closest one.
        """
        for arm in self.arms:
            if arm.name == name:
                return arm
        names = [arm.name for arm in self.arms]
        raise ConfigError(f"table {self.table} has no arm {name!r}{suggestion(name, names)}")

    def chosen(self, scale: Scale, only: Sequence[str] = ()) -> tuple[Arm, ...]:
        """Return the arms to run, in the order of the table.

        Args:
            scale: whose own selection counts if no arms are named.
            only: names of arms.

        Raises:
            ConfigError: an arm is unknown.
        """
        wanted = only or self.selected.get(scale, ())
        if not wanted:
            return self.arms
        for name in wanted:
            self.arm(name)  # raises an error where there is none
        arms = []
        for arm in self.arms:
            if arm.name in wanted:
                arms.append(arm)
        return tuple(arms)


def suggestion(name: str, existing: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the closest existing one, or all."""
    names = list(existing)
    close = closest(name, names, cutoff=0.5)
    if close:
        return f"; did you mean {close!r}?"
    return f"; there are {', '.join(names)}"


def stated(experiment: Experiment, scale: Scale) -> str:
    """Return a digest of all that a table states beforehand.

    These are arms, seeds, rounds, what decides, and claims. Stored figures hold the digest, so what
    goes into it must not change.
    """
    arms: dict[str, Settings] = {}
    for arm in experiment.arms:
        arms[arm.name] = arm.settings(scale)
    statement = {
        "arms": arms,
        "seeds": experiment.seeds[scale],
        "decides": experiment.decides[scale],
        "claims": list(map(asdict, experiment.claims)),
    }
    text = json.dumps(statement, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return digest[:8]
