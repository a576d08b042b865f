"""Initial weights from a file or an earlier run, by the model's names or renamed ones."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.errors import ConfigError
from fleet_protocol.spelling import did_you_mean
from trainer_export.coverage import LEAST_SHARE, LEFT_OUT, NOT_IN_MODEL, Coverage
from trainer_export.start_files import Array
from trainer_export.start_names import NamePair, example_pair, rename_all

_SHOWN = 3  # names in a message

# Largest difference of a file's buffer from the model's, because half precision rounds.
_BUFFER_RELATIVE = 4e-3
_BUFFER_ABSOLUTE = 1e-6


@dataclass(frozen=True)
class InitialWeights:
    """The initial weights of a model.

    Attributes:
        tensors: the tensors by their names in the source.
        source: their source, for messages.
        names: pairs of a name in the source and a name in the model; a ``*`` in both matches the
            same text. The first match is used; names without a match are unchanged.
        partial: whether tensors of the model may be missing in the source or have another shape
            (they are then drawn), and whether the source may have additional tensors.
        least_share: smallest share of tensors that a partial start must take, see `Coverage.share`.
        report: called with what was taken, if anything was.
    """

    tensors: Mapping[str, Array]
    source: str
    names: Sequence[tuple[str, str]] = ()
    partial: bool = False
    least_share: float = LEAST_SHARE
    report: Callable[[Coverage], None] | None = None

    def with_names(self, current: Mapping[str, str]) -> "InitialWeights":
        """Return the start with other names for some tensors, unless `names` has them.

        Args:
            current: the model's names of tensors that its package stores under other names.
        """
        pairs = [NamePair(theirs, ours) for theirs, ours in self.names]
        tensors: dict[str, Array] = {}
        for name, value in self.tensors.items():
            is_named = any(pair.matches(name) for pair in pairs)
            tensors[name if is_named else current.get(name, name)] = value
        return replace(self, tensors=tensors)

    def put_into(
        self,
        weights: Mapping[str, Array],
        further: Mapping[str, str | NDArray[np.generic]] = MappingProxyType({}),
    ) -> dict[str, Array]:
        """Return the drawn weights of a model, with the available tensors replaced.

        Args:
            weights: drawn weights by the first name of each.
            further: other names in the model's state, mapped to the first name, or to the values of
                buffers that the model computes itself; empty for unused names.

        Raises:
            ConfigError: a pair of names matches nothing, two tensors get one name, what is one in
                the model differs, a buffer has other values, none fits, without `partial` not all
                fit, or with it fewer than `least_share`; the message names some.
        """
        offered, left_out = self._by_our_names(weights.keys() | further.keys())
        self._settle_further(offered, weights, further)
        fitting = set()
        for name in weights.keys() & offered.keys():
            if weights[name].shape == offered[name].shape:
                fitting.add(name)
        # Nothing is missing, and nothing is left over.
        all_fit = fitting == weights.keys() | offered.keys()
        if not fitting or not (self.partial or all_fit):
            raise ConfigError(f"{self.source}: {self._misfit(weights, offered, fitting)}")
        coverage = self._coverage(weights, offered, fitting, left_out)
        if self.partial:
            coverage.require(self.least_share)
        if self.report is not None:
            self.report(coverage)
        merged = dict(weights)
        for name in weights:
            if name in fitting:
                merged[name] = offered[name]
        return merged

    def _by_our_names(self, ours: Collection[str]) -> tuple[dict[str, Array], list[str]]:
        """Return the tensors by the names of the model, and the names of those left out."""
        pairs = [NamePair(theirs, our_name) for theirs, our_name in self.names]
        offered: dict[str, Array] = {}
        left_out: list[str] = []
        for theirs, name in rename_all(self.tensors, pairs, ours, self.source).items():
            if name:
                offered[name] = self.tensors[theirs]
            else:
                left_out.append(theirs)
        return offered, left_out

    def _settle_further(
        self,
        offered: dict[str, Array],
        weights: Mapping[str, Array],
        further: Mapping[str, str | NDArray[np.generic]],
    ) -> None:
        """Check tensors that the model has beside its weights, and remove them from those offered.

        A further name of a weight offers its value to the first name.
        """
        for name in offered.keys() & further.keys() - weights.keys():
            first = further[name]
            value = offered.pop(name)
            # A buffer, which graphs contain as a constant.
            if not isinstance(first, str):
                self._refuse_buffer(name, first, value)
            # The file may have the tensor only by its further name.
            elif first and not np.array_equal(offered.setdefault(first, value), value):
                raise ConfigError(
                    f"{self.source}: {name} and {first} differ, but they are one tensor in the"
                    " model"
                )

    def _coverage(
        self,
        weights: Mapping[str, Array],
        offered: Mapping[str, Array],
        fitting: set[str],
        left_out: Sequence[str],
    ) -> Coverage:
        """Return what a model takes of the tensors that are offered."""
        taken: dict[str, int] = {}
        random: dict[str, int] = {}
        for name, value in weights.items():
            outcome = taken if name in fitting else random
            outcome[name] = value.size
        left: dict[str, int] = {}
        reasons: dict[str, str] = {}
        for name, value in offered.items():
            if name in fitting:
                continue
            left[name] = value.size
            reasons[name] = NOT_IN_MODEL
            if name in weights:
                reasons[name] = _unlike_shape(value, weights[name])
        for name in left_out:
            left[name] = self.tensors[name].size
            reasons[name] = LEFT_OUT
        return Coverage(self.source, taken, left, random, reasons)

    def _refuse_buffer(
        self,
        name: str,
        buffer: NDArray[np.generic],
        value: Array,
    ) -> None:
        """Refuse a file whose buffer differs from the one that the model computes."""
        # A partial start may have a buffer of another shape; the model computes its own.
        same = self.partial
        if buffer.shape == value.shape:
            same = np.allclose(buffer, value, _BUFFER_RELATIVE, _BUFFER_ABSOLUTE, equal_nan=True)
        if not same:
            raise ConfigError(
                f"{self.source}: the buffer {name} differs from the model's, and the export"
                " would use the model's: give the model the buffer of the file, or make it a"
                " parameter with requires_grad=False"
            )

    def _misfit(
        self,
        weights: Mapping[str, Array],
        offered: Mapping[str, Array],
        fitting: set[str],
    ) -> str:
        """Return the mismatches, and the options that resolve them."""
        reasons: list[str] = []
        remedies: list[str] = []
        unlike = sorted(weights.keys() & offered.keys() - fitting)
        for name in unlike[:_SHOWN]:
            reasons.append(f"{name} is {_unlike_shape(offered[name], weights[name])}")
        if unlike:
            remedies.append("build the model with the sizes of the source")
        missing = sorted(weights.keys() - offered.keys())
        additional = sorted(offered.keys() - weights.keys())
        if missing:
            reasons.append(f"{len(missing)} tensors of the model are missing ({_some(missing)})")
        if additional:
            hint = did_you_mean(additional[0], weights)
            reasons.append(
                f"{len(additional)} do not belong to the model ({_some(additional)}){hint}"
            )
        if missing or additional:
            pair = example_pair(_shapes(offered, additional), _shapes(weights, missing))
            example = f", such as '{pair}'" if pair else ""
            remedies.append(f"map names that differ with --start-name THEIRS=OURS{example}")
        # Nothing fits by itself.
        if fitting:
            remedies.append("load only what fits with --start-partial")
        return f"{'; '.join(reasons)}; {', or '.join(remedies)}"


def _shapes(tensors: Mapping[str, Array], names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        shapes[name] = tensors[name].shape
    return shapes


def _unlike_shape(value: Array, expected: Array) -> str:
    """Describe a tensor whose shape differs from the model's."""
    return f"{list(value.shape)} and should be {list(expected.shape)}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
