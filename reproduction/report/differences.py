"""Differences of two configurations, as texts: what a published protocol has and ours has not."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from simulation.settings import HOW_COMPUTED, SimulationConfig

_ABSENT = "none"


@dataclass(frozen=True)
class Difference:
    """A key with different values in two configurations."""

    key: str  # such as `round.rounds`
    published: str  # its value in the published protocol, as text
    here: str  # its value in ours
    arms: tuple[str, ...] = ()  # names of the arms with this difference; empty for all


def differences(published: SimulationConfig, here: SimulationConfig) -> tuple[Difference, ...]:
    """Return the keys, sorted, whose values differ in two configurations, defaults included."""
    before = _flat(published)
    after = _flat(here)
    keys = before.keys() | after.keys()
    differing: list[Difference] = []
    for key in sorted(keys):
        old = before.get(key, _ABSENT)
        new = after.get(key, _ABSENT)
        if old != new:
            differing.append(Difference(key, old, new))
    return tuple(differing)


def grouped(by_arm: Mapping[str, Sequence[Difference]]) -> tuple[Difference, ...]:
    """Return the distinct differences of several arms with their arms, sorted by key.

    A difference of all arms has no names.
    """
    arms: dict[Difference, list[str]] = {}
    for arm, differing in by_arm.items():
        for difference in differing:
            arms.setdefault(difference, []).append(arm)
    merged: list[Difference] = []
    by_key = sorted(arms, key=lambda difference: (difference.key, difference.here))
    for difference in by_key:
        names = arms[difference]
        # A difference that all arms share is one of the table.
        if len(names) == len(by_arm):
            names = []
        merged.append(replace(difference, arms=tuple(names)))
    return tuple(merged)


def _flat(config: SimulationConfig) -> dict[str, str]:
    """Return the settings of a configuration as texts, by key such as `round.rounds`."""
    # Seeds and workers do not belong to the protocol.
    excluded = {*HOW_COMPUTED, "seed"}
    settings = config.model_dump(mode="json", exclude=excluded)
    return dict(_values(settings, ""))


def _values(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            inner = f"{path}.{key}" if path else str(key)
            yield from _values(entry, inner)
    # Kinds of devices have no names to compare by, so all of them are one text.
    elif path == "devices.types":
        yield path, _kinds(value)
    else:
        yield path, _text(value)


def _kinds(kinds: Sequence[Mapping[str, Any]]) -> str:
    """Describe kinds of devices by their differences from the defaults."""
    descriptions: list[str] = []
    for kind in kinds:
        # A kind without a count has all devices that other kinds leave.
        count = str(kind["count"] or "the rest")
        words = [count, kind["type"], "at", _text(kind["link"])]
        for key in ("max_width", "max_depth", "memory"):
            limit = kind[key]
            # Other limits do not bind.
            if limit not in (None, 1.0, 0):
                words.append(f"{key} {_text(limit)}")
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
