"""Layouts: the axes of all dimensions of all parameters of a global model.

The server needs only the layout to cut and merge a model; it is stored beside the graphs as
``layout.json`` and can be read without torch.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
)

from fleet_protocol.errors import ConfigError, PlanError
from fleet_protocol.foreign_files import Label
from fleet_protocol.frozen import problems
from models.axes import Axis, AxisKind
from models.block_names import HEAD, block_names
from models.dims import Dim
from models.parameters import Parameter, Statistic
from models.tier import WHOLE_SHARE, Tier

FORMAT_VERSION = 1
_MOST_ENTRIES = 2**25
"""The most units of all axes, and the most entries of a dimension; as int64 they have 256 MB."""


def freeze(value: Any) -> Any:
    """Make a JSON value immutable: lists become tuples, and objects read-only mappings."""
    if isinstance(value, Mapping):
        return MappingProxyType({key: freeze(entry) for key, entry in value.items()})
    if isinstance(value, (list, tuple)):
        return tuple(map(freeze, value))
    return value


def thaw(value: Any) -> Any:
    """Convert the result of `freeze` back into plain dictionaries and lists."""
    if isinstance(value, Mapping):
        return {key: thaw(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return list(map(thaw, value))
    return value


# A file has the axes as a list, in their order.
_BY_NAME = BeforeValidator(lambda axes: {str(axis["name"]): axis for axis in axes})
_LISTED = PlainSerializer(lambda axes: [axis.to_json() for axis in axes.values()])


@dataclass(frozen=True)
class Layout:
    """The global model of one architecture, described without its weights.

    Attributes:
        arch: name of the architecture.
        settings: settings it was built with, JSON values (sequences as tuples).
        axes: every axis by name.
        parameters: the parameters in the order the module registers them.
        statistics: its static batch norms, in module order; empty if it has none.
        depth: number of blocks; 1 if the model has no depth unit.
        depths: the depths that a tier may have, ascending.
        label_axes: axes whose rows a device may change only for its own labels (the label rule).
        input_shape: shape of one sample, without the batch.
        input_dtype: ``float32``, or ``int64`` for tokens.
        classes: number of labels.
        heads: number of labels of tiers with a separate head, by tier id.
        base: frozen tensors, in module order. They are the same in all rounds, so weights, plans
            and merges do not contain them. Graphs read them from a file, which all tiers share
            unless a width cuts some of them.
    """

    arch: Label
    settings: Annotated[Mapping[str, Any], PlainSerializer(thaw)]
    axes: Annotated[Mapping[str, Axis], _BY_NAME, _LISTED]
    parameters: tuple[Parameter, ...]
    statistics: tuple[Statistic, ...]
    depth: int
    depths: tuple[int, ...]
    label_axes: tuple[Label, ...]
    input_shape: tuple[int, ...]
    input_dtype: Literal["float32", "int64"]
    classes: int
    heads: Annotated[Mapping[str, int], PlainSerializer(dict)] = field(default_factory=dict)
    base: tuple[Parameter, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", freeze(self.settings))
        object.__setattr__(self, "heads", MappingProxyType(dict(self.heads)))
        object.__setattr__(self, "axes", MappingProxyType(dict(self.axes)))
        _check(self)

    def tier(
        self,
        width: float,
        depth: int | None = None,
        trained: float = WHOLE_SHARE,
    ) -> Tier:
        """Return a tier of this model, by default with all its blocks, all of them trained.

        Raises:
            PlanError: the model does not support the width or the depth; the message lists the
                valid ones.
        """
        chosen = self.depth if depth is None else depth
        if chosen not in self.depths:
            allowed = ", ".join(map(str, self.depths))
            raise PlanError(
                f"{self.arch} has no sub-model of depth {chosen}; its depths are {allowed}"
            )
        return Tier(width, chosen, trained)

    def blocks(self, tier: Tier) -> frozenset[str]:
        """Return the names of the blocks that a tier keeps: stem, head and lowest units.

        Raises:
            PlanError: if the model does not have the depth.
        """
        return block_names(self.tier(tier.width, tier.depth).depth)

    def base_of(self, tier: Tier) -> dict[str, tuple[int, ...]]:
        """Return the local shapes of the frozen tensors of a tier, in registration order."""
        blocks = self.blocks(tier)
        shapes: dict[str, tuple[int, ...]] = {}
        for tensor in self.base:
            if tensor.block in blocks:
                shapes[tensor.name] = self.local_shape(tensor.dims, tier.width)
        return shapes

    @property
    def labelled(self) -> frozenset[str]:
        """Return the label axes that have a row for each label.

        For a smaller axis, every device updates every row.
        """
        names: set[str] = set()
        for name in self.label_axes:
            if self.axes[name].size >= self.classes:
                names.add(name)
        return frozenset(names)

    @property
    def cut_base(self) -> str | None:
        """Return the name of the first frozen tensor that a width cuts, or None."""
        for tensor in self.base:
            if any(map(self.is_cut, tensor.dims)):
                return tensor.name
        return None

    def kept(self, tier: Tier) -> tuple[Parameter, ...]:
        """Return the parameters that a tier keeps in registration order; errors as in `blocks`."""
        blocks = self.blocks(tier)
        kept: list[Parameter] = []
        for parameter in self.parameters:
            if parameter.block in blocks:
                kept.append(parameter)
        return tuple(kept)

    def local_shape(
        self,
        dims: Iterable[Dim],
        width: float,
    ) -> tuple[int, ...]:
        """Compute the shape of a tensor with these dimensions in a sub-model of this width."""
        return tuple(dim.length(self.axes, width) for dim in dims)

    def is_cut(self, dim: Dim) -> bool:
        """Return whether a tier's width makes a dimension shorter."""
        return any(self.axes[segment.axis].kind is AxisKind.WIDTH for segment in dim.segments)

    def has_labels(self, dim: Dim) -> bool:
        """Return whether a dimension carries a label axis."""
        return any(segment.axis in self.label_axes for segment in dim.segments)

    def classes_of(self, tier: Tier) -> int:
        """Return the number of labels of a tier: the model's, or that of its separate head."""
        return self.heads.get(tier.id, self.classes)

    def own_head(self, tier: Tier) -> tuple[Parameter, ...]:
        """Return the parameters of a tier's separate head; empty if it shares the model's."""
        if tier.id not in self.heads:
            return ()
        head: list[Parameter] = []
        for parameter in self.parameters:
            if parameter.block == HEAD:
                head.append(parameter)
        return tuple(head)

    def shapes(self, tier: Tier) -> dict[str, tuple[int, ...]]:
        """Return the local shapes of the parameters that a tier keeps, in registration order.

        It raises the errors of `blocks`.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for parameter in self.kept(tier):
            shapes[parameter.name] = self.local_shape(parameter.dims, tier.width)
        for parameter in self.own_head(tier):
            sizes = list(shapes[parameter.name])
            for position, dim in enumerate(parameter.dims):
                if dim.axis in self.label_axes:
                    sizes[position] = self.classes_of(tier) * dim.inner
            shapes[parameter.name] = tuple(sizes)
        return shapes

    def parameter_count(self, tier: Tier) -> int:
        """Count the scalar parameters of a tier; raises the errors of `blocks`."""
        return sum(math.prod(shape) for shape in self.shapes(tier).values())

    def to_json(self) -> str:
        """Write the layout as JSON text, the content of ``layout.json``."""
        # Few layouts have them, and a file without a field reads as its default, which is empty.
        empty: set[str] = set()
        for name in ("heads", "base"):
            if not getattr(self, name):
                empty.add(name)
        document = _STORED.dump_python(self, mode="json", exclude=empty)
        return json.dumps({"version": FORMAT_VERSION, **document}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Layout":
        """Read an equal layout back from JSON text.

        Raises:
            ConfigError: the text is not a layout of this format version.
        """
        try:
            return _read(json.loads(text))
        except ValidationError as error:
            described = problems(error, "document")
            raise ConfigError(
                f"layout.json cannot be read ({described}); export the architecture again"
            ) from error
        except (ValueError, KeyError, TypeError, RecursionError, PlanError) as error:
            raise ConfigError(
                f"layout.json cannot be read ({error!r}); export the architecture again"
            ) from error


_STORED = TypeAdapter(Layout)


def _read(document: Mapping[str, Any]) -> Layout:
    if document["version"] != FORMAT_VERSION:
        raise ValueError(
            f"its format version is {document['version']}, but this release reads {FORMAT_VERSION}"
        )
    return _STORED.validate_python(document)


def _check(layout: Layout) -> None:
    """Refuse an inconsistent layout before it is used."""
    if layout.input_dtype not in ("float32", "int64"):
        raise PlanError(
            f"{layout.arch}: input dtype {layout.input_dtype!r} is neither float32 nor int64"
        )
    _check_depths(layout)
    _check_sizes(layout)
    names = [parameter.name for parameter in (*layout.parameters, *layout.base)]
    if len(set(names)) != len(names):
        raise PlanError(f"{layout.arch}: two parameters share a name")
    tensors: list[Parameter | Statistic] = [
        *layout.parameters,
        *layout.base,
        *layout.statistics,
    ]
    _check_references(layout, tensors)
    for parameter in (*layout.parameters, *layout.base):
        if layout.local_shape(parameter.dims, 1.0) != parameter.shape:
            raise PlanError(
                f"{layout.arch}: the axes of {parameter.name} do not add up to {parameter.shape}"
            )
    _check_labels(layout, tensors)
    for tier_id, classes in layout.heads.items():
        _check_head(layout, Tier.parse(tier_id), classes)


def _check_sizes(layout: Layout) -> None:
    """Refuse a layout whose plans take more memory than any model's.

    A plan lists the units of every axis and the entries of every dimension.
    """
    units = sum(axis.size for axis in layout.axes.values())
    if units > _MOST_ENTRIES:
        raise PlanError(
            f"{layout.arch}: its axes have {units:,} units; {_MOST_ENTRIES:,} are the most"
        )
    tensors: list[Parameter | Statistic] = [
        *layout.parameters,
        *layout.base,
        *layout.statistics,
    ]
    for tensor in tensors:
        for dim in tensor.dims:
            is_known = all(segment.axis in layout.axes for segment in dim.segments)
            length = dim.length(layout.axes, 1.0) if is_known else 0
            if length > _MOST_ENTRIES:
                raise PlanError(
                    f"{layout.arch}: a dimension of {tensor.name} has {length:,} entries;"
                    f" {_MOST_ENTRIES:,} are the most"
                )


def _check_depths(layout: Layout) -> None:
    depths = list(layout.depths)
    is_ascending = depths == sorted(set(depths))
    if not depths or depths[-1] != layout.depth or not is_ascending:
        raise PlanError(
            f"{layout.arch}: depths {layout.depths} do not ascend to its depth {layout.depth}"
        )


def _check_references(layout: Layout, tensors: Iterable[Parameter | Statistic]) -> None:
    """Refuse tensors with axes or blocks that the layout does not have."""
    blocks = block_names(layout.depth)
    for tensor in tensors:
        for dim in tensor.dims:
            for segment in dim.segments:
                if segment.axis not in layout.axes:
                    raise PlanError(
                        f"{layout.arch}: {tensor.name} carries the unknown axis {segment.axis}"
                    )
        if tensor.block not in blocks:
            raise PlanError(
                f"{layout.arch}: {tensor.name} belongs to the unknown block {tensor.block}"
            )


def _check_labels(layout: Layout, tensors: Iterable[Parameter | Statistic]) -> None:
    """Refuse label axes to which the label rule cannot be applied."""
    for tensor in tensors:
        for dim in tensor.dims:
            if not dim.is_plain and layout.has_labels(dim):
                raise PlanError(
                    f"{layout.arch}: {tensor.name} mixes rows of labels with others; put the"
                    " rows of labels into a separate tensor"
                )
    for name in layout.label_axes:
        if name not in layout.axes or layout.axes[name].kind is not AxisKind.FIXED:
            raise PlanError(f"{layout.arch}: label axis {name} is not one of its fixed axes")


def _check_head(
    layout: Layout,
    tier: Tier,
    classes: int,
) -> None:
    """Refuse a separate head of a tier that is cut by width or shares parameters of labels."""
    layout.tier(tier.width, tier.depth)
    is_cut_by_depth = tier.width == 1.0 and tier.depth < layout.depth
    if classes < 1 or not is_cut_by_depth or tier.trained != WHOLE_SHARE:
        raise PlanError(
            f"{layout.arch}: {tier.id} cannot have its own head with {classes} labels: only"
            " shallower tiers of width 1 can, if they train everything, and the whole model takes"
            " its labels from the setting `classes`"
        )
    for parameter in (*layout.parameters, *layout.base):
        trains_in_head = parameter.block == HEAD and parameter not in layout.base
        has_labels = any(dim.axis in layout.label_axes for dim in parameter.dims)
        if has_labels and not trains_in_head:
            raise PlanError(
                f"{layout.arch}: {parameter.name} depends on the labels but is not part of a"
                " trainable head, so no tier can have its own labels"
            )
