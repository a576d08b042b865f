"""What may be taken from a request, or from a configuration that a store has: a list of numbers, each in bounds.

A server runs its own configuration, the file that `shoal up --config` named. A request sets what `SETTABLE` lists, and
for every other setting it carries a fingerprint, which is compared with the server's own and never read as a value. So
no path, address, program or function can come out of a message or a store.

`SETTABLE` has what says for how long and how fast a run trains. Left out on purpose, although they are numbers too, is
what says who takes part and whose updates make a version (``round.fraction``, ``quorum``, ``min_devices``,
``[robust]``), what protects one device (``[privacy]``, ``[secure_sum]``), and what the model is.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from broker_server.settings.fleet import FleetConfig
from fleet_protocol.errors import ConfigError
from fleet_protocol.frozen import problems

_FINGERPRINT_DIGITS = 16
_MOST_NAMED = 8  # settings that a refusal names
_WEEK_SECONDS = 7 * 24 * 3600


@dataclass(frozen=True)
class Bounds:
    """Which numbers a request may set."""

    least: float
    most: float
    whole: bool = False

    def allow(self, value: object) -> bool:
        """Whether a value is such a number."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return self.least <= value <= self.most and not (self.whole and isinstance(value, float))

    def __str__(self) -> str:
        if self.whole:
            return f"a whole number from {self.least} to {self.most}"
        return f"a number from {self.least:g} to {self.most:g}"


SETTABLE: Mapping[str, Bounds] = MappingProxyType(
    {
        "seed": Bounds(0, 2**64 - 1, whole=True),
        "round.rounds": Bounds(1, 100_000, whole=True),
        "round.deadline_seconds": Bounds(1, _WEEK_SECONDS),
        "round.wait_seconds": Bounds(1, _WEEK_SECONDS),
        "round.retries": Bounds(1, 1000, whole=True),
        "train.learning_rate": Bounds(1e-12, 1000),
        "train.epochs": Bounds(1, 10_000, whole=True),
        "train.steps": Bounds(1, 1_000_000, whole=True),
        "train.batch_size": Bounds(1, 65_536, whole=True),
        "train.micro_batch": Bounds(1, 65_536, whole=True),
        "evaluation.every": Bounds(1, 100_000, whole=True),
        "evaluation.patience": Bounds(1, 100_000, whole=True),
        "evaluation.min_delta": Bounds(0, 1000),
    }
)


@dataclass(frozen=True)
class Wanted:
    """What a request says of a run: values of `SETTABLE`, and one or two fingerprints of each other setting."""

    settings: Mapping[str, int | float]
    others: Mapping[str, str]

    @classmethod
    def of(cls, config: FleetConfig) -> "Wanted":
        """What asks for a run of a configuration; what is None, and so no number, is among the others."""
        leaves = config.leaves()
        settings = {name: leaves[name][1] for name in SETTABLE if leaves[name][1] is not None}
        others = {name: _fingerprints(values) for name, values in leaves.items() if name not in settings}
        return cls(settings, others)


def granted(own: FleetConfig, wanted: Wanted) -> FleetConfig:
    """The server's own configuration with what a request may set.

    Raises:
        ConfigError: the request differs in what it may not set, or asks for numbers out of bounds; each is named.
    """
    mine = Wanted.of(own)
    refused = _differences(mine, wanted)
    if refused:
        raise ConfigError(
            f"it differs from the server's own configuration in {in_words(refused)}, which cannot be set from outside "
            f"(these can: {', '.join(SETTABLE)})"
        )
    changes = {name: value for name, value in wanted.settings.items() if mine.settings.get(name) != value}
    for name, value in changes.items():
        if not SETTABLE[name].allow(value):
            raise ConfigError(f"{name} = {value!r} is out of bounds: ask for {SETTABLE[name]}")
    return _with(own, changes)


def in_words(names: Sequence[str]) -> str:
    """Settings that differ, the first of many."""
    named = ", ".join(names[:_MOST_NAMED])
    return named if len(names) <= _MOST_NAMED else f"{named} and {len(names) - _MOST_NAMED} more"


def _differences(mine: Wanted, wanted: Wanted) -> list[str]:
    """Settings that no request may set, and that it wants to be others than they are."""
    names = mine.others.keys() | wanted.others.keys()
    other = {name for name in names if not _alike(mine.others.get(name, ""), wanted.others.get(name, ""))}
    other -= {name for name in wanted.settings if name in SETTABLE}  # None here, and a number is asked for
    strange = wanted.settings.keys() - SETTABLE.keys()
    return sorted(other | strange)


def _with(own: FleetConfig, changes: Mapping[str, int | float]) -> FleetConfig:
    if not changes:
        return own
    document: dict[str, Any] = own.model_dump()
    for name, value in changes.items():
        table = document
        *tables, key = name.split(".")
        for inner in tables:
            table = table[inner]
        table[key] = value
    try:
        return FleetConfig.model_validate(document)
    except ValidationError as error:
        text = problems(error, "the document")
        raise ConfigError(f"the server's configuration with the settings of the request: {text}") from error


def _fingerprints(values: tuple[Any, Any]) -> str:
    """That of a setting beside the store, and where that is another one, of the one with absolute paths."""
    prints = []
    for value in values:
        text = json.dumps(value, sort_keys=True)
        prints.append(hashlib.sha256(text.encode()).hexdigest()[:_FINGERPRINT_DIGITS])
    return " ".join(dict.fromkeys(prints))


def _alike(mine: str, wanted: str) -> bool:
    return bool(set(mine.split()) & set(wanted.split()))
