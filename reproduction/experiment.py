"""What an experiment is: a table of a paper as arms, each of which is a simulation's configuration
at three scales.

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

    Of two values for one key the later counts, tables are joined in turn.
    """
    whole: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            before = whole.get(key, {})
            whole[key] = (
                merged(before, value)
                if isinstance(before, Mapping) and isinstance(value, Mapping)
                else value
            )
    return whole


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
        """The configuration of a run.

        `run` has ``out``, ``cache`` and what else does not belong to the table.
        """
        settings = merged(self.settings(scale), {"seed": seed, **run})
        return validate_config(
            settings, SimulationConfig, source=f"arm {self.name} with seed {seed}"
        )

    @property
    def folder(self) -> str:
        """Its name as part of a path."""
        return self.name.replace("/", "--").replace(":", "-")


@dataclass(frozen=True)
class Claim:
    """What a table is there to show, of one arm against another seed by seed, or of one arm alone.

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
        """The comparison of two figures."""
        return left - right if self.how == "minus" else left / right


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
        """The arms to run, in the order of the table: those that are named, or else the scale's own
        selection.

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


def stated(experiment: Experiment, scale: Scale) -> str:
    """A digest of all that a table states beforehand: arms, seeds, rounds, what decides, and
    claims.
    """
    whole = {
        "arms": {arm.name: arm.settings(scale) for arm in experiment.arms},
        "seeds": experiment.seeds[scale],
        "decides": experiment.decides[scale],
        "claims": [asdict(claim) for claim in experiment.claims],
    }
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:8]
