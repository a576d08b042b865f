"""Describes an experiment: a table of a paper, whose arms are configurations of simulations.

Every arm has a configuration at each of three scales.

``paper`` is the published protocol. ``small`` takes less than two hours per seed on two cores for
the default arms, ``smoke`` takes minutes. An arm describes all three as plain tables of
``sim.toml``, so that their differences are computed from the configurations and never written by
hand.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from fleet_protocol.configuration import validate_config
from fleet_protocol.errors import ConfigError
from fleet_protocol.spelling import closest
from reproduction.published import Published
from reproduction.readings import Measure
from simulation.settings import SimulationConfig

Scale = Literal["smoke", "small", "paper"]
SCALES: tuple[Scale, ...] = get_args(Scale)

Settings = Mapping[str, Any]
"""Tables of ``sim.toml`` as plain values, without what a run adds: seed, folders and engine."""


def merged(*layers: Settings) -> dict[str, Any]:
    """Join settings, from the most general to the most special, into new ones.

    The later of two values for a key wins; tables are merged recursively.
    """
    settings: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            earlier = settings.get(key, {})
            are_tables = isinstance(earlier, Mapping) and isinstance(value, Mapping)
            # A list replaces the earlier list, because its entries have no names by which to join
            # them.
            settings[key] = merged(earlier, value) if are_tables else value
    return settings


# Without equality by value: some fields are functions and mappings, which have no hash.
@dataclass(frozen=True, eq=False)
class Arm:
    """One row of a table for one data set and split, trained once for each seed.

    Attributes:
        name: unique in its table, such as ``a-e/iid``.
        about: description, one line.
        settings: the tables of ``sim.toml`` at a scale.
        published: the paper's values by name of the measure; missing ones were not published.
        earlier_defaults: former defaults that the table relied on when it was stated. They keep the
            runs unchanged, and are not part of the statement.
    """

    name: str
    about: str
    measures: tuple[Measure, ...]
    settings: Callable[[Scale], Settings]
    published: Mapping[str, Published]
    earlier_defaults: Settings = field(default_factory=dict)

    def config(self, scale: Scale, seed: int, **run: Any) -> SimulationConfig:
        """Return the configuration of a run.

        Args:
            scale: scale of the run.
            seed: seed of the run.
            run: ``out``, ``cache`` and other settings outside the table.

        Raises:
            ConfigError: the settings are not valid for a simulation.
        """
        own = self.settings(scale)
        # Former defaults come first, so that the settings of the table can override them.
        settings = merged(self.earlier_defaults, own, {"seed": seed, **run})
        # No file has these settings, so an error names the arm.
        source = f"arm {self.name} with seed {seed}"
        return validate_config(settings, SimulationConfig, source=source)

    @property
    def folder(self) -> str:
        """Return the name of the arm as part of a path."""
        # A slash would make a folder in a folder, and Windows refuses colons in names.
        name = self.name.replace("/", "--")
        return name.replace(":", "-")


@dataclass(frozen=True)
class Claim:
    """A claim of a table about one arm against another, seed by seed, or about a single arm.

    Attributes:
        says: the claim in a sentence; empty for a printed comparison without a claim.
        left: name of an arm.
        right: name of the arm to compare with; empty for none.
        measure: name of a measure that both have.
        how: ``minus`` for the difference, ``over`` for the ratio.
        at_least: the claim holds if the figure is above this bound; None for no lower bound.
        at_most: the same for the upper bound.
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
        title: displayed title.
        url: address of the paper.
        section: section of the specification that describes the method.
        rank: its position if all tables are run; the main ones come first.
        arms: all of them, in the order of the table.
        seeds: default seeds of each scale.
        decides: number of last evaluations whose mean decides, by scale.
        selected: default arms of a scale; scales that are missing run all arms.
        claims: the claims of the table, stated before it is run.
        notes: differences from the paper at every scale that no configuration shows.
        checked: checks of claims that do not hold, one paragraph or list each.
        repeated: the table that states a claim with other or further seeds, by the claim's
            sentence.
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
    repeated: Mapping[str, str] = field(default_factory=dict)

    def arm(self, name: str) -> Arm:
        """Return an arm by its name.

        Raises:
            ConfigError: there is no such arm; the message names the closest one.
        """
        for arm in self.arms:
            if arm.name == name:
                return arm
        names = [arm.name for arm in self.arms]
        raise ConfigError(f"table {self.table} has no arm {name!r}{suggestion(name, names)}")

    def chosen(self, scale: Scale, only: Sequence[str] = ()) -> tuple[Arm, ...]:
        """Return the arms to run, in the order of the table.

        Args:
            scale: scale whose selection is the default.
            only: names of arms.

        Raises:
            ConfigError: an arm is unknown.
        """
        wanted = only or self.selected.get(scale, ())
        if not wanted:
            return self.arms
        for name in wanted:
            self.arm(name)  # raises an error for an unknown name
        # In the order of the table, so that a page does not depend on the order of the request.
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
    """Return a digest of everything that a table states beforehand.

    It covers arms, seeds, rounds, the deciding figure, and claims. Stored figures contain the
    digest, so its inputs must not change.
    """
    arms: dict[str, Settings] = {}
    for arm in experiment.arms:
        # Without the former defaults: they keep a run unchanged, but state nothing.
        arms[arm.name] = arm.settings(scale)
    # Without titles, notes and descriptions, so that rewording them changes no digest.
    statement = {
        "arms": arms,
        "seeds": experiment.seeds[scale],
        "decides": experiment.decides[scale],
        "claims": list(map(asdict, experiment.claims)),
    }
    # Sorted, because the order of keys in a file has no meaning.
    text = json.dumps(statement, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    # Eight digits are enough to notice a change; the digest does not protect from forgery.
    return digest[:8]
