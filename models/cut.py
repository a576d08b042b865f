"""The cut that a builder asks for every size that a tier may change, and so names the axes.

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

The layout of the global model is inferred from such calls: the model is rebuilt with each axis a
little larger, and the dimensions that grow carry that axis; exchanging its units then proves it.
This module does not import torch.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from fleet_protocol.errors import ConfigError, PlanError
from models.axes import Axis, AxisKind

CLASSES = "classes"
"""Name of the label axis, whose rows fall under the label rule."""

FIXED_PREFIX = "fixed."
"""How the names of axes begin that no builder names, such as kernels and vocabularies."""


class Cut:
    """Answers a builder's questions about sizes with those to build, and remembers what was asked.

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
        """Make a cut for one build.

        Args:
            rate: width share of the sub-model, in (0, 1].
            depth: blocks to keep; all if omitted. 0 builds the model without its blocks, to tell
                them apart.
            enlarge: by how many units to make each group of some axes larger than it should be, for
                inferring layouts.
        """
        self._rate = rate
        self._depth = depth
        self._enlarge = dict(enlarge or {})
        self._axes: dict[str, Axis] = {}
        self._labels: dict[str, None] = {}  # a set in the order of the calls
        self._blocks: int | None = None
        self._declared: Axis | None = None

    def forget(self) -> None:
        """Forget what was asked, for a builder that is called once more."""
        self._axes.clear()
        self._labels.clear()
        self._blocks = None

    def declare(self, axis: Axis) -> None:
        """Use an axis instead of the one of its name that the builder asks for.

        It has as many units, or a unit for each group of them.
        """
        self._declared = axis

    @property
    def rate(self) -> float:
        """Width share of this build relative to the global model, which a Scaler divides by."""
        return self._rate

    @property
    def axes(self) -> Mapping[str, Axis]:
        """The axes asked for so far, in order."""
        return MappingProxyType(self._axes)

    @property
    def label_axes(self) -> tuple[str, ...]:
        """Names of the axes whose rows fall under the label rule, in order."""
        return tuple(self._labels)

    @property
    def is_bare(self) -> bool:
        """Whether this build has no blocks, as one build has while a layout is inferred."""
        return self._depth == 0

    @property
    def blocks(self) -> int | None:
        """Blocks of the global model; None if the builder did not ask for a depth."""
        return self._blocks

    def width(self, name: str, size: int, *, leading: bool = False) -> int:
        """Name an axis that a tier's width cuts.

        Args:
            name: unique in the model; layers that add to one another (a residual stream) share one
                name.
            size: units in the global model.
            leading: whether its units are not interchangeable (places of a rotation or of a fixed
                table), but the leading ones alone make a model. That is not proved; rolling and
                random plans refuse the axis.

        Raises:
            ConfigError: if the name is taken by an axis of another size or kind.
        """
        return self._kept(Axis(name, size, leading=leading))

    def widths(self, name: str, sizes: Iterable[int]) -> tuple[int, ...]:
        """Name the axes of layers in a row, `name` and a number from 1, each as of `width`."""
        return tuple(self.width(f"{name}{number}", size) for number, size in enumerate(sizes, 1))

    def heads(self, name: str, heads: int, head_dim: int, *, leading: bool = False) -> int:
        """Name an axis of equal groups (attention heads); every group stays and becomes thinner.

        Queries, keys and values may be fused, one behind the other or head by head. A residual
        stream that layers of torch split into heads themselves is ``cut.heads("embed", 4, 16) *
        4``.

        Args:
            name: unique in the model.
            heads: number of heads.
            head_dim: dimensions of each head in the global model.
            leading: as for `width`.

        Returns:
            Dimensions of each head to build; the projection has `heads` times as many rows.

        Raises:
            ConfigError: if the name is taken by an axis of another size or kind.
        """
        return self._kept(Axis(name, heads * head_dim, groups=heads, leading=leading)) // heads

    def groups(self, name: str, groups: int) -> int:
        """Name an axis of groups that are kept or left out as a whole.

        Such are the groups of a norm or of a grouped convolution, and heads that rotate.

        Example:
            >>> groups = Cut(0.5).groups("conv1", 8)
            >>> groups, groups * 4  # for GroupNorm(groups, groups * 4) after 32 channels
            (4, 16)

        Args:
            name: unique in the model.
            groups: number of groups in the global model.

        Returns:
            Number of groups to build; the channels are that many times those of a group, which is
            not cut.

        Raises:
            ConfigError: if the name is taken by an axis of another size or kind.
        """
        return self.width(name, groups)

    def whole(self) -> "Cut":
        """Return a cut that leaves every width as it is.

        It is for a part that is the same in every tier, such as a frozen model. Depth and labels
        are those of this cut.
        """
        return _WholeCut(self)

    def classes(self, n: int) -> int:
        """Name the rows of the classifier, one for each label. They are never cut.

        Raises:
            ConfigError: if it was called before with another number.
        """
        return self.labels(CLASSES, n)

    def labels(self, name: str, n: int) -> int:
        """Name another axis with a row for each label, such as a token embedding. It is never cut.

        Under the label rule a device changes the rows of its own labels alone, on every such axis.

        Args:
            name: unique in the model.
            n: number of rows: the labels first, then rows that belong to none.

        Raises:
            ConfigError: if the name is taken by an axis of another size or kind.
        """
        kept = self._kept(Axis(name, n, AxisKind.FIXED))
        self._labels[name] = None
        return kept

    def depth(self, blocks: int) -> int:
        """Ask how many of the model's equal blocks to build, from the bottom.

        Args:
            blocks: number of blocks in the global model.

        Returns:
            Number of blocks to build. It is 0 once while a layout is inferred, so build them in a
            loop.

        Raises:
            ConfigError: if it is called twice in one build, or with less than 1 block.
            PlanError: if the tier asks for more blocks than there are.
        """
        if self._blocks is not None:
            raise ConfigError("cut.depth was called twice in one build; a model has one depth unit")
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
        if axis.name.startswith(FIXED_PREFIX):
            raise ConfigError(
                f"axis {axis.name}: names that start with {FIXED_PREFIX!r} are taken; choose "
                "another"
            )
        units = 1  # of the axis that the builder asked for, for each unit of the one used
        if self._declared is not None and self._declared.name == axis.name:
            units = axis.size // self._declared.size
            axis = self._declared
        first = self._axes.setdefault(axis.name, axis)
        if first != axis:
            raise ConfigError(
                f"axis {axis.name} was named twice, as {first.size} units in {first.groups} groups "
                f"and as {axis.size} in {axis.groups}; give different layers different names"
            )
        enlarged = axis.groups * self._enlarge.get(axis.name, 0)
        return (axis.kept(self._rate) + enlarged) * units


class _WholeCut(Cut):
    """Answers for a part of a model that no width cuts."""

    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self._cut = cut

    def depth(self, blocks: int) -> int:
        return self._cut.depth(blocks)

    def labels(self, name: str, n: int) -> int:
        return self._cut.labels(name, n)

    def _kept(self, axis: Axis) -> int:
        return axis.size
