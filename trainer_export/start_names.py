"""Names of tensors in a file that a model starts from, and the names that the model has for them.

A pair has a name or a pattern of each side; a ``*`` in both stands for the same text.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet_protocol.errors import ConfigError
from fleet_protocol.spelling import closest, did_you_mean


@dataclass(frozen=True)
class NamePair:
    """A name or pattern of the source, and the model's for it; empty to leave its tensors out."""

    theirs: str
    ours: str

    def __str__(self) -> str:
        return f"{self.theirs}={self.ours}"

    def matches(self, name: str) -> bool:
        """Return whether a name of the source is meant."""
        return _matches(self.theirs, name)

    def rename(self, name: str) -> str:
        """Return the model's name of a tensor that matches."""
        head, _, tail = self.theirs.partition("*")
        return self.ours.replace("*", name[len(head) : len(name) - len(tail)])


def _matches(pattern: str, name: str) -> bool:
    """Return whether a pattern with at most one star describes a name."""
    head, star, tail = pattern.partition("*")
    if not star:
        return name == pattern
    # A start and an end that overlap in the name leave nothing for the star.
    return len(name) >= len(head + tail) and name.startswith(head) and name.endswith(tail)


def rename_all(
    names: Iterable[str], pairs: Sequence[NamePair], ours: Collection[str], source: str
) -> dict[str, str]:
    """Return the model's name of each tensor; those that are left out have an empty one.

    The first matching pair is used; names without a match are unchanged.

    Args:
        names: names of the source.
        pairs: pairs of names there and in the model.
        ours: the names of the model.
        source: source for messages.

    Raises:
        ConfigError: a pair matches nothing there, or all that it matches gets names that the model
            does not have, or two tensors get one name.
    """
    theirs = list(names)
    for pair in pairs:
        if not any(map(pair.matches, theirs)):
            raise ConfigError(
                f"{source}: --start-name {str(pair)!r}: {_unmatched(pair, theirs, ours)}"
            )
    renamed: dict[str, str] = {}
    users: dict[NamePair, list[str]] = {}
    for name in theirs:
        renamed[name] = name
        first = next((pair for pair in pairs if pair.matches(name)), None)
        if first is None:
            continue
        renamed[name] = first.rename(name)
        if first.ours:
            users.setdefault(first, []).append(renamed[name])
    _refuse_duplicates(renamed, source)
    for pair, results in users.items():
        # Some of the names may be unknown: a partial start leaves such tensors out.
        if not any(name in ours for name in results):
            hint = did_you_mean(pair.ours, _patterns_of(ours))
            raise ConfigError(
                f"{source}: --start-name {str(pair)!r}: the model has no tensor {results[0]}{hint};"
                f" correct the part after the =, or omit these tensors with"
                f" --start-name '{pair.theirs}='"
            )
    return renamed


def _refuse_duplicates(
    renamed: Mapping[str, str],
    source: str,
) -> None:
    first: dict[str, str] = {}
    for theirs, ours in renamed.items():
        if not ours:
            continue
        if ours in first:
            raise ConfigError(
                f"{source}: two tensors would be {ours}, {first[ours]} and {theirs}; make the"
                " names differ"
            )
        first[ours] = theirs


def _unmatched(
    pair: NamePair,
    theirs: Sequence[str],
    ours: Collection[str],
) -> str:
    """Say why a pair matches nothing, with the one that was probably meant."""
    is_reversed = any(_matches(pair.theirs, name) for name in ours)
    if is_reversed and pair.ours and any(_matches(pair.ours, name) for name in theirs):
        return (
            "it is the wrong way round; the file's name comes first: --start-name"
            f" '{pair.ours}={pair.theirs}'"
        )
    hint = did_you_mean(pair.theirs, _patterns_of(theirs))
    shown = ", ".join(theirs[:3])
    return f"it matches no tensor there{hint}; the first names there are {shown}"


def _patterns_of(names: Iterable[str]) -> list[str]:
    """List names, and the patterns of the modules that contain them."""
    patterns: dict[str, None] = {}  # a set in the order of the names
    for name in names:
        modules = name.split(".")
        for count in range(1, len(modules)):
            patterns[".".join(modules[:count]) + ".*"] = None
        patterns[name] = None
    return list(patterns)


def example_pair(
    additional: Mapping[str, Any],
    missing: Mapping[str, Any],
) -> str:
    """Return a pair that would rename tensors of a source to those that a model misses.

    Args:
        additional: shapes of tensors of the source that the model does not have.
        missing: shapes of tensors of the model that the source does not have.

    Returns:
        A pair as --start-name takes it; empty if none is apparent.
    """
    prefix = _prefix_over(list(additional), missing)
    if prefix:
        return f"{prefix}*=*"
    prefix = _prefix_over(list(missing), additional)
    if prefix:
        return f"*={prefix}*"
    for name, shape in additional.items():
        # Only a tensor of the same shape could be taken.
        alike = [ours for ours, expected in missing.items() if expected == shape]
        ours = closest(name, alike)
        if ours is not None:
            return f"{name}={ours}"
    return ""


def _prefix_over(longer: Sequence[str], shorter: Collection[str]) -> str:
    """Return the prefix that most of the longer names add to one of the shorter names."""
    prefixes: dict[str, int] = {}
    for name in longer:
        for prefix in _prefixes(name):
            if name.removeprefix(prefix) in shorter:
                prefixes[prefix] = prefixes.get(prefix, 0) + 1
    if not prefixes:
        return ""
    # The longest of the prefixes that fit equally often.
    return max(prefixes, key=lambda prefix: (prefixes[prefix], len(prefix)))


def _prefixes(name: str) -> Iterator[str]:
    for dot in re.finditer(r"\.", name):
        yield name[: dot.end()]
