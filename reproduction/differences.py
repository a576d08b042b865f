"""What differs between two configurations, key by key; nothing of it is written by hand."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    before, after = _flat(published), _flat(here)
    return tuple(
        Difference(key, before.get(key, _ABSENT), after.get(key, _ABSENT))
        for key in sorted(before.keys() | after.keys())
        if before.get(key, _ABSENT) != after.get(key, _ABSENT)
    )


def grouped(by_arm: Mapping[str, Sequence[Difference]]) -> tuple[Difference, ...]:
    """The differences of several arms, each once, sorted by key, with its arms; without arms where it holds for all."""
    arms: dict[Difference, list[str]] = {}
    for arm, found in by_arm.items():
        for difference in found:
            arms.setdefault(difference, []).append(arm)
    return tuple(
        Difference(item.key, item.published, item.here, () if len(names) == len(by_arm) else tuple(names))
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
        limits = [f"{key} {_text(kind[key])}" for key in ("max_width", "max_depth") if kind[key] not in (None, 1.0)]
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
    return ", ".join(map(_text, value)) or _ABSENT if isinstance(value, (list, tuple)) else str(value)
