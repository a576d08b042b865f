"""The coverage of a model by the tensors that it starts from."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fleet_protocol.errors import ConfigError

LEAST_SHARE = 0.5
"""The smallest share of tensors that a partial start must take, unless the user sets another."""

# A number between dots, at the beginning or at the end of a dotted name.
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")
_SHOWN = 3  # groups of names in a message

NOT_IN_MODEL = "the model does not have it"
LEFT_OUT = "--start-name leaves it out"


@dataclass(frozen=True)
class Group:
    """Tensors of one outcome whose names differ only in their numbers.

    Attributes:
        name: name of the tensor; of several with ``*`` for each number, such as
            ``layers.*.weight``.
        tensors: how many there are.
        reason: why the model did not take them; empty if it did.
    """

    name: str
    tensors: int
    reason: str = ""


@dataclass(frozen=True)
class Coverage:
    """The coverage of a model by its initial weights.

    Attributes:
        source: source of the tensors, for messages.
        taken: tensors of the model that have their values from the source, with their numbers of
            entries.
        left: tensors of the source that the model did not take, with their numbers of entries.
        random: tensors of the model that keep their random values, with their numbers of entries.
        reasons: why each tensor of `left` was not taken.
    """

    source: str
    taken: Mapping[str, int]
    left: Mapping[str, int]
    random: Mapping[str, int]
    reasons: Mapping[str, str]

    @property
    def share(self) -> float:
        """The share of the source or of the model that was taken, whichever is larger.

        Each share is the smaller of two: the share of tensors and the share of entries. So neither
        a large embedding makes up for missing layers, nor do many norms for the matrices between
        them.
        """
        # A checkpoint may be larger than the model, or the model larger than the checkpoint;
        # neither by itself is a mistake.
        return max(_share(self.taken, self.left), _share(self.taken, self.random))

    def require(self, least: float) -> None:
        """Check that enough was taken.

        Raises:
            ConfigError: the share is below the least one; the message names what is missing.
        """
        if self.share >= least:
            return
        # The model has tensors of these names, in other shapes.
        unlike: list[str] = []
        for name in self.left:
            if name in self.random:
                unlike.append(name)
        remedies: list[str] = []
        if unlike:
            example = f"{unlike[0]} is {self.reasons[unlike[0]]}"
            remedies.append(
                f"{len(unlike)} have another shape ({example}): build the model with the sizes of"
                " the source"
            )
        if len(unlike) < len(self.left):
            remedies.append("correct --start-name")
        remedies.append("or accept")
        tensors = len(self.taken) + len(self.random)
        share = f"{self.share:.2f}"
        raise ConfigError(
            f"{self.source}: the model takes {len(self.taken)} of its {tensors} tensors from there,"
            f" a share of {share}; {len(self.random)} would remain random ({_some(self.random)})"
            f" and {len(self.left)} of the source would be left ({_some(self.left)});"
            f" {'; '.join(remedies)} this share with --start-share {share}"
        )

    def groups(self) -> Mapping[str, tuple[Group, ...]]:
        """Return the tensors by outcome, ``taken``, ``left`` and ``random``, in groups."""
        return {
            "taken": _grouped(self.taken, {}),
            "left": _grouped(self.left, self.reasons),
            "random": _grouped(self.random, {}),
        }


def _share(taken: Mapping[str, int], missing: Mapping[str, int]) -> float:
    """Return the share of tensors, or of their entries if that is smaller, that was taken."""
    tensors = len(taken) + len(missing)
    entries = sum(taken.values()) + sum(missing.values())
    share_of_tensors = len(taken) / max(1, tensors)
    share_of_entries = sum(taken.values()) / max(1, entries)
    return min(share_of_tensors, share_of_entries)


def _grouped(names: Iterable[str], reasons: Mapping[str, str]) -> tuple[Group, ...]:
    """Join names that differ only in numbers, such as those of equal blocks."""
    counts: dict[tuple[str, str], int] = {}
    single: dict[tuple[str, str], str] = {}
    for name in names:
        key = (_NUMBER.sub("*", name), reasons.get(name, ""))
        counts[key] = counts.get(key, 0) + 1
        single.setdefault(key, name)
    groups: list[Group] = []
    for (pattern, reason), count in counts.items():
        # One tensor keeps its whole name, because a star would hide its number.
        name = single[pattern, reason] if count == 1 else pattern
        groups.append(Group(name, count, reason))
    return tuple(groups)


def _some(names: Iterable[str]) -> str:
    """Name a few groups of tensors."""
    groups = [group.name for group in _grouped(names, {})]
    shown = ", ".join(groups[:_SHOWN])
    return shown + (", ..." if len(groups) > _SHOWN else "")
