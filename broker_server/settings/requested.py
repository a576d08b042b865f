"""Defines which settings a request, or a stored configuration, may set: numbers within bounds.

A server runs its own configuration, the file given to `shoal up --config`. A request sets numbers
of `SETTABLE`. For every other setting it carries a fingerprint, which the server compares with its
own and never reads as a value. So no path, address, program or function can come from a message or
a store.

`SETTABLE` lists the settings for how long and how fast a run trains. It leaves out, although they
are numbers too, the settings that decide which devices take part and whose updates make a version
(``round.fraction``, ``quorum``, ``min_devices``, ``[robust]``), that protect one device
(``[privacy]``, ``[secure_sum]``), and that define the model.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from broker_server.settings.fleet import FleetConfig, SettingValue
from fleet_protocol.errors import ConfigError
from fleet_protocol.frozen import problems

_FINGERPRINT_DIGITS = 16
_MOST_NAMED = 8  # settings that a refusal names
_WEEK_SECONDS = 7 * 24 * 3600


@dataclass(frozen=True)
class Bounds:
    """The numbers that a request may set for one setting."""

    least: float
    most: float
    whole: bool = False

    def allow(self, value: object) -> bool:
        """Return whether a value is such a number."""
        # True and False are integers in Python.
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        # A whole number with a fraction point is another value in JSON.
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
class RequestedSettings:
    """The settings in a request for a run.

    Attributes:
        settings: values of `SETTABLE`.
        others: fingerprints of each other setting.
    """

    settings: Mapping[str, int | float]
    others: Mapping[str, str]

    @classmethod
    def from_config(cls, config: FleetConfig) -> "RequestedSettings":
        """Build the request for a run of a configuration.

        A setting that is None is among the fingerprints.
        """
        own = config.run_settings()
        settings: dict[str, int | float] = {}
        for name in SETTABLE:
            # A setting without a value is compared by its fingerprint.
            if own[name].absolute is not None:
                settings[name] = own[name].absolute
        fingerprints = {
            name: _fingerprints(values) for name, values in own.items() if name not in settings
        }
        return cls(settings, fingerprints)


def grant(own: FleetConfig, request: RequestedSettings) -> FleetConfig:
    """Return the server's own configuration with the numbers of a request.

    Raises:
        ConfigError: the request differs in other settings, or has numbers out of bounds; the
            message names them.
    """
    # The server's own settings in the same form, so that equal ones compare equal.
    mine = RequestedSettings.from_config(own)
    refused = _refused_settings(mine, request)
    if refused:
        raise ConfigError(
            f"it differs from the server's own configuration in {name_settings(refused)}, which a"
            f" request cannot set (it can set: {', '.join(SETTABLE)})"
        )
    changes: dict[str, int | float] = {}
    for name, value in request.settings.items():
        # An equal value changes nothing, even if it is out of bounds.
        if mine.settings.get(name) == value:
            continue
        if not SETTABLE[name].allow(value):
            raise ConfigError(f"{name} = {value!r} is out of bounds: use {SETTABLE[name]}")
        changes[name] = value
    return _with_changes(own, changes)


def name_settings(names: Sequence[str]) -> str:
    """Name settings that differ; of many, only the first."""
    listed = ", ".join(names[:_MOST_NAMED])
    if len(names) <= _MOST_NAMED:
        return listed
    return f"{listed} and {len(names) - _MOST_NAMED} more"


def _refused_settings(mine: RequestedSettings, request: RequestedSettings) -> list[str]:
    """Return the settings that differ from the server's although a request may not set them."""
    refused = set(request.settings.keys() - SETTABLE.keys())
    for name in mine.others.keys() | request.others.keys():
        # None in the server's configuration, but a number that the request may set.
        settable = name in SETTABLE and name in request.settings
        if not settable and not _alike(mine.others.get(name, ""), request.others.get(name, "")):
            refused.add(name)
    return sorted(refused)


def _with_changes(own: FleetConfig, changes: Mapping[str, int | float]) -> FleetConfig:
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
        raise ConfigError(
            f"the server's configuration is not valid with the settings of the request: {text}"
        ) from error


def _fingerprints(values: SettingValue) -> str:
    """Return the fingerprints of the forms of a setting, once where they are the same."""
    fingerprints = []
    for value in (values.relative, values.absolute):
        # Sorted, so that equal tables have equal fingerprints.
        text = json.dumps(value, sort_keys=True)
        fingerprints.append(hashlib.sha256(text.encode()).hexdigest()[:_FINGERPRINT_DIGITS])
    # Paths within the fleet's folder differ in their forms; all other settings have one.
    return " ".join(dict.fromkeys(fingerprints))


def _alike(mine: str, requested: str) -> bool:
    # One form in common is enough: see `SettingValue`.
    return not set(mine.split()).isdisjoint(requested.split())
