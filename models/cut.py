"""The cut from which a builder takes all sizes that a tier may change; this names the axes.

A builder is a plain function that builds a plain torch module::

    @architecture()
    def two_layers(cut, *, input_shape=(64,), classes=10, hidden=128):
        kept = cut.width("hidden", hidden)
        return nn.Sequential(
            nn.Linear(input_shape[0], kept),
            Scaler(cut.rate),
            nn.ReLU(),
            nn.Linear(kept, cut.classes(classes)),
        )

The layout of the global model is inferred from such calls: the model is rebuilt with each axis
slightly larger, and the dimensions that grow carry that axis; permuting its units then proves it.
This module does not import torch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from fleet_protocol.errors import ConfigError, PlanError
from models.axes import Axis, AxisKind, Rounding

CLASSES = "classes"
"""Name of the label axis, to whose rows the label rule applies."""

FIXED_PREFIX = "fixed."
"""Prefix of the names of axes that no builder names, such as kernels and vocabularies."""


class Cut:
    """Gives a builder the sizes to build, and records the requested axes.

    Example:
        >>> cut = Cut(0.5)
        >>> cut.width("hidden", 128), cut.heads("attention", heads=4, head_dim=16), cut.classes(10)
        (64, 8, 10)
        >>> sorted(cut.axes)
        ['attention', 'classes', 'hidden']
    """

    def __init__(
        self,
        rate: float = 1.0,
        depth: int | None = None,
        *,
        enlarge: Mapping[str, int] | None = None,
    ) -> None:
        """Create a cut for one build.

        Args:
            rate: width share of the sub-model, in (0, 1].
            depth: number of blocks to keep; all if omitted. 0 builds the model without its blocks,
                to identify them.
            enlarge: number of extra units in each group of some axes, for inferring layouts.
        """
        self._rate = rate
        self._depth = depth
        self._enlarge = dict(enlarge or {})
        self._axes: dict[str, Axis] = {}
        self._labels: dict[str, None] = {}  # a set in the order of the calls
        self._blocks: int | None = None
        self._declared: Axis | None = None
        self._joined: dict[str, str] = {}
        self._rounding: Rounding = "ceil"

    def forget(self) -> None:
        """Reset the records, for another call of the builder."""
        self._axes.clear()
        self._labels.clear()
        self._blocks = None

    def round_units(self, rounding: Rounding) -> None:
        """Choose what becomes of a part of a unit on all axes that are requested afterwards."""
        self._rounding = rounding

    def declare(self, axis: Axis) -> None:
        """Use an axis instead of the requested one of the same name.

        It has the same number of units, or one unit for each group of them.
        """
        self._declared = axis

    def join(
        self,
        names: Iterable[str],
        name: str,
    ) -> None:
        """Take some axes for one of another name, as if the builder requested it for all of them.

        They have the same number of units.
        """
        self._joined.update(dict.fromkeys(names, name))

    @property
    def rate(self) -> float:
        """Return the width share of this build, by which a Scaler divides."""
        return self._rate

    @property
    def axes(self) -> Mapping[str, Axis]:
        """Return the axes requested so far, in order."""
        return MappingProxyType(self._axes)

    @property
    def label_axes(self) -> tuple[str, ...]:
        """Return the names of the axes to whose rows the label rule applies, in order."""
        return tuple(self._labels)

    @property
    def is_bare(self) -> bool:
        """Return whether this build has no blocks, as in one step of inferring a layout."""
        return self._depth == 0

    @property
    def blocks(self) -> int | None:
        """Return the blocks of the global model; None if the builder did not request a depth."""
        return self._blocks

    def width(
        self,
        name: str,
        size: int,
        *,
        leading: bool = False,
    ) -> int:
        """Name an axis that a tier's width cuts.

        Args:
            name: unique in the model; layers whose outputs are added (a residual stream) share one
                name.
            size: units in the global model.
            leading: whether its units are not interchangeable (places of a rotation or of a fixed
                table), but the leading ones are a valid model. This is not proved; rolling and
                random plans refuse the axis.

        Raises:
            ConfigError: the name belongs to an axis of another size or kind.
        """
        return self._kept(Axis(name, size, leading=leading, rounding=self._rounding))

    def widths(
        self,
        name: str,
        sizes: Iterable[int],
        *,
        leading: bool = False,
    ) -> tuple[int, ...]:
        """Name the axes of consecutive layers, `name` with a number from 1; see `width`."""
        kept: list[int] = []
        for number, size in enumerate(sizes, 1):
            kept.append(self.width(f"{name}{number}", size, leading=leading))
        return tuple(kept)

    def heads(
        self,
        name: str,
        heads: int,
        head_dim: int,
        *,
        leading: bool = False,
    ) -> int:
        """Name an axis of equal groups (attention heads); all groups stay and become smaller.

        Queries, keys and values may be fused, one after another or head by head. A residual stream
        that torch's layers split into heads is ``cut.heads("embed", 4, 16) * 4``.

        Args:
            name: unique in the model.
            heads: number of heads.
            head_dim: dimensions of each head in the global model.
            leading: whether the leading units are kept, as for `width`.

        Returns:
            Dimensions of each head to build; the projection has `heads` times as many rows.

        Raises:
            ConfigError: the name belongs to an axis of another size or kind.
        """
        # Whole heads stay, so each of them gives up the same share of its dimensions.
        axis = Axis(name, heads * head_dim, groups=heads, leading=leading, rounding=self._rounding)
        return self._kept(axis) // heads

    def groups(
        self,
        name: str,
        groups: int,
    ) -> int:
        """Name an axis of groups that are kept or removed as a whole.

        Examples are the groups of a norm or of a grouped convolution, and rotary heads.

        Example:
            >>> groups = Cut(0.5).groups("conv1", 8)
            >>> groups, groups * 4  # for GroupNorm(groups, groups * 4) after 32 channels
            (4, 16)

        Args:
            name: unique in the model.
            groups: number of groups in the global model.

        Returns:
            Number of groups to build; multiply it by the channels of a group, which are not cut.

        Raises:
            ConfigError: the name belongs to an axis of another size or kind.
        """
        return self.width(name, groups)

    def whole(self) -> "Cut":
        """Return a cut that does not change any width.

        Use it for a part that is the same in every tier, such as a frozen model. Depth and labels
        are those of this cut.
        """
        return _WholeCut(self)

    def classes(self, n: int) -> int:
        """Name the rows of the classifier, one for each label. They are never cut.

        Raises:
            ConfigError: it was called before with another number.
        """
        return self.labels(CLASSES, n)

    def labels(
        self,
        name: str,
        n: int,
    ) -> int:
        """Name another axis with a row for each label, such as a token embedding. It is never cut.

        Under the label rule, a device changes only the rows of its own labels on every such axis.

        Args:
            name: unique in the model.
            n: number of rows: first those of the labels, then rows without a label.

        Raises:
            ConfigError: the name belongs to an axis of another size or kind.
        """
        # Fixed: a width never removes the row of a label.
        kept = self._kept(Axis(name, n, AxisKind.FIXED))
        self._labels[name] = None
        return kept

    def depth(self, blocks: int) -> int:
        """Return how many of the model's equal blocks to build, from the bottom.

        Args:
            blocks: number of blocks in the global model.

        Returns:
            Number of blocks to build. It is 0 once while a layout is inferred, so build them in a
            loop.

        Raises:
            ConfigError: it is called twice in one build, or with less than 1 block.
            PlanError: the tier has more blocks than the model.
        """
        # The record of the first call would be lost.
        if self._blocks is not None:
            raise ConfigError(
                "cut.depth was called twice in one build; a model can have only one depth unit"
            )
        if blocks < 1:
            raise ConfigError(
                f"cut.depth({blocks}): a model with a depth unit has at least 1 block"
            )
        self._blocks = blocks
        if self._depth is None:
            return blocks
        if not 0 <= self._depth <= blocks:
            raise PlanError(
                f"depth {self._depth} does not exist; this model has depths 1 to {blocks}"
            )
        return self._depth

    def _kept(self, axis: Axis) -> int:
        # Inference names the axes that it adds itself with this prefix.
        if axis.name.startswith(FIXED_PREFIX):
            raise ConfigError(
                f"axis {axis.name}: names that start with {FIXED_PREFIX!r} are reserved; choose"
                " another name"
            )
        if axis.name in self._joined:
            axis = replace(axis, name=self._joined[axis.name])
        units = 1  # units of the requested axis for each unit of the used one
        if self._declared is not None and self._declared.name == axis.name:
            units = axis.size // self._declared.size
            axis = self._declared
        # A name that is requested again must mean the same axis, as in a residual stream.
        first = self._axes.setdefault(axis.name, axis)
        if first != axis:
            raise ConfigError(
                f"axis {axis.name} was requested twice, with {first.size} units in"
                f" {first.groups} groups and with {axis.size} in {axis.groups}; give different"
                " layers different names"
            )
        # One more unit for each group, so that groups stay equal.
        enlarged = axis.groups * self._enlarge.get(axis.name, 0)
        return (axis.kept(self._rate) + enlarged) * units


class _WholeCut(Cut):
    """Gives the sizes of a part of a model that no width cuts."""

    def __init__(self, cut: Cut) -> None:
        super().__init__()
        # Its own sizes are those of the whole model.
        self._cut = cut

    def depth(self, blocks: int) -> int:
        return self._cut.depth(blocks)

    def labels(
        self,
        name: str,
        n: int,
    ) -> int:
        return self._cut.labels(name, n)

    def _kept(self, axis: Axis) -> int:
        return axis.size
