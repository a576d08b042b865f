"""Layouts: which axis every dimension of every parameter of a global model carries, as a plain
value.

A layout is all the server needs to cut and merge a model; it is written beside the graphs as
``layout.json`` and read back without torch.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    PlainSerializer,
    PlainValidator,
    TypeAdapter,
    ValidationError,
)

from fleet_protocol.errors import ConfigError, PlanError
from fleet_protocol.foreign_files import Label
from fleet_protocol.frozen import problems
from models.axes import Axis, AxisKind
from models.dims import Dim
from models.tier import Tier

FORMAT_VERSION = 1
STEM = "stem"
HEAD = "head"


def block_name(number: int) -> str:
    """Name the depth unit with this 1-based number, as parameters carry it."""
    return f"block{number}"


def freeze(value: Any) -> Any:
    """Turn the lists of a JSON value into tuples, at every depth, so that it cannot change under
    its owner.
    """
    if isinstance(value, Mapping):
        return MappingProxyType({key: freeze(item) for key, item in value.items()})
    return tuple(freeze(item) for item in value) if isinstance(value, (list, tuple)) else value


def thaw(value: Any) -> Any:
    """Turn the result of `freeze` back into plain dictionaries and lists."""
    if isinstance(value, Mapping):
        return {key: thaw(item) for key, item in value.items()}
    return [thaw(item) for item in value] if isinstance(value, tuple) else value


_BY_NAME = BeforeValidator(lambda axes: {str(item["name"]): item for item in axes})
_LISTED = PlainSerializer(lambda axes: [asdict(axis) for axis in axes.values()])
_Dim = Annotated[Dim, PlainValidator(Dim.from_json), PlainSerializer(Dim.to_json)]


@dataclass(frozen=True)
class Parameter:
    """A trained tensor of the global model: dotted path, global shape, and ``stem``, ``block1``
    ..., or ``head``.
    """

    name: Label
    shape: tuple[int, ...]
    dims: tuple[_Dim, ...]
    block: Label


@dataclass(frozen=True)
class Statistic:
    """A static batch norm, whose mean and variance vectors, of one dimension, are asked for after
    training.
    """

    name: Label
    dims: tuple[_Dim, ...]
    block: Label

    @property
    def tensors(self) -> tuple[str, str]:
        """Names of the mean and the variance vector among the tensors of a graph."""
        return f"stat.{self.name}.mean", f"stat.{self.name}.var"


@dataclass(frozen=True)
class Layout:
    """The global model of one architecture, described without its weights.

    Attributes:
        arch: name of the architecture.
        settings: what it was built with, JSON values (sequences as tuples).
        axes: every axis by name.
        parameters: in the order the module registers them.
        statistics: its static batch norms, in module order; empty if it has none.
        depth: number of blocks; 1 if the model has no depth unit.
        depths: the depths a tier may ask for, ascending.
        label_axes: axes whose rows a device may only change for labels it has seen (the label
            rule).
        input_shape: shape of one sample, without the batch.
        input_dtype: ``float32``, or ``int64`` for tokens.
        classes: number of labels.
        heads: tiers with a head of their own, which no other tier shares, by id: the number of
            their labels.
        base: frozen tensors, in module order. They are the same in all rounds, so they are in no
            weights, plan or
            merge: graphs take them from a file, which is one for all tiers unless a width cuts some
                of them.
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

    def tier(self, width: float, depth: int | None = None) -> Tier:
        """Make a tier of this model, by default of all its blocks.

        A PlanError names widths and depths it can have.
        """
        chosen = self.depth if depth is None else depth
        if chosen not in self.depths:
            allowed = ", ".join(map(str, self.depths))
            raise PlanError(
                f"{self.arch} has no sub-model of depth {chosen}; its depths are {allowed}"
            )
        return Tier(width, chosen)

    def blocks(self, tier: Tier) -> frozenset[str]:
        """Name the blocks a tier keeps: stem, head and lowest units.

        A PlanError if the model has no such depth.
        """
        checked = self.tier(tier.width, tier.depth)
        return frozenset(
            {
                STEM,
                HEAD,
                *(block_name(number) for number in range(1, checked.depth + 1)),
            }
        )

    def base_of(self, tier: Tier) -> dict[str, tuple[int, ...]]:
        """Map the frozen tensors that a tier reads from its base to their local shapes, in
        registration order.
        """
        blocks = self.blocks(tier)
        return {
            item.name: self.local_shape(item.dims, tier.width)
            for item in self.base
            if item.block in blocks
        }

    @property
    def labelled(self) -> frozenset[str]:
        """Label axes with a row for each label, first, and perhaps more.

        Of a smaller one every row is taken.
        """
        return frozenset(name for name in self.label_axes if self.axes[name].size >= self.classes)

    @property
    def cut_base(self) -> str | None:
        """The first frozen tensor that a width cuts, None where there is none."""
        return next((item.name for item in self.base if any(map(self.is_cut, item.dims))), None)

    def kept(self, tier: Tier) -> tuple[Parameter, ...]:
        """List the parameters a tier keeps, in registration order; errors as of `blocks`."""
        blocks = self.blocks(tier)
        return tuple(parameter for parameter in self.parameters if parameter.block in blocks)

    def local_shape(self, dims: Iterable[Dim], width: float) -> tuple[int, ...]:
        """Compute the shape of a tensor with these dimensions in a sub-model of this width."""
        return tuple(dim.length(self.axes, width) for dim in dims)

    def is_cut(self, dim: Dim) -> bool:
        """Whether a tier's width makes the dimension shorter."""
        return any(self.axes[part.axis].kind is AxisKind.WIDTH for part in dim.segments)

    def classes_of(self, tier: Tier) -> int:
        """Number of labels of a tier: the model's, or those of the head it has of its own."""
        return self.heads.get(tier.id, self.classes)

    def own_head(self, tier: Tier) -> tuple[Parameter, ...]:
        """List the parameters of the head a tier has of its own; none if it shares the model's."""
        return (
            tuple(item for item in self.parameters if item.block == HEAD)
            if tier.id in self.heads
            else ()
        )

    def shapes(self, tier: Tier) -> dict[str, tuple[int, ...]]:
        """Map the parameters a tier keeps to their local shapes, in registration order.

        Errors as of `blocks`.
        """
        shapes = {item.name: self.local_shape(item.dims, tier.width) for item in self.kept(tier)}
        for item in self.own_head(tier):
            shapes[item.name] = tuple(
                self.classes_of(tier) * dim.inner if dim.axis in self.label_axes else size
                for dim, size in zip(item.dims, shapes[item.name], strict=True)
            )
        return shapes

    def parameter_count(self, tier: Tier) -> int:
        """Count the scalar parameters of a tier; errors as of `blocks`."""
        return sum(math.prod(shape) for shape in self.shapes(tier).values())

    def to_json(self) -> str:
        """Write the layout as JSON text, the content of ``layout.json``."""
        empty = {name for name in ("heads", "base") if not getattr(self, name)}
        document = _STORED.dump_python(self, mode="json", exclude=empty)
        return json.dumps({"version": FORMAT_VERSION, **document}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Layout":
        """Read an equal layout back from JSON text.

        A ConfigError if it is none of this format version.
        """
        try:
            return _read(json.loads(text))
        except ValidationError as error:
            wrong = problems(error, "document")
            raise ConfigError(
                f"layout.json cannot be read ({wrong}); export the architecture again"
            ) from error
        except (ValueError, KeyError, TypeError, RecursionError, PlanError) as error:
            raise ConfigError(
                f"layout.json cannot be read ({error!r}); export the architecture again"
            ) from error


_STORED = TypeAdapter(Layout)


def _read(document: Mapping[str, Any]) -> Layout:
    if document["version"] != FORMAT_VERSION:
        raise ValueError(
            f"format version {document['version']}, this release reads {FORMAT_VERSION}"
        )
    return _STORED.validate_python(document)


def _check(layout: Layout) -> None:
    """Refuse a layout that contradicts itself, before anything is cut by it."""
    if layout.input_dtype not in ("float32", "int64"):
        raise PlanError(
            f"{layout.arch}: input dtype {layout.input_dtype!r} is neither float32 nor int64"
        )
    if (
        not layout.depths
        or layout.depths[-1] != layout.depth
        or sorted(set(layout.depths)) != [*layout.depths]
    ):
        raise PlanError(
            f"{layout.arch}: depths {layout.depths} do not ascend to its depth {layout.depth}"
        )
    blocks = {
        STEM,
        HEAD,
        *(block_name(number) for number in range(1, layout.depth + 1)),
    }
    names = [item.name for item in (*layout.parameters, *layout.base)]
    if len(set(names)) != len(names):
        raise PlanError(f"{layout.arch}: two parameters share a name")
    items: list[Parameter | Statistic] = [
        *layout.parameters,
        *layout.base,
        *layout.statistics,
    ]
    for item in items:
        unknown = [
            part.axis for dim in item.dims for part in dim.segments if part.axis not in layout.axes
        ]
        if unknown:
            raise PlanError(f"{layout.arch}: {item.name} carries the unknown axis {unknown[0]}")
        if item.block not in blocks:
            raise PlanError(f"{layout.arch}: {item.name} belongs to the unknown block {item.block}")
    for parameter in (*layout.parameters, *layout.base):
        if layout.local_shape(parameter.dims, 1.0) != parameter.shape:
            raise PlanError(
                f"{layout.arch}: the axes of {parameter.name} do not add up to {parameter.shape}"
            )
    for item in items:
        for dim in item.dims:
            if not dim.is_plain and any(part.axis in layout.label_axes for part in dim.segments):
                raise PlanError(
                    f"{layout.arch}: {item.name} has rows of labels among others; give them a tensor alone"
                )
    for name in layout.label_axes:
        if name not in layout.axes or layout.axes[name].kind is not AxisKind.FIXED:
            raise PlanError(f"{layout.arch}: label axis {name} is not one of its fixed axes")
    for tier_id, classes in layout.heads.items():
        _check_head(layout, Tier.parse(tier_id), classes)


def _check_head(layout: Layout, tier: Tier, classes: int) -> None:
    """A head of a tier's own: whole in width, so that nothing else is cut with it, and all that
    goes with labels.
    """
    layout.tier(tier.width, tier.depth)
    if classes < 1 or tier.width != 1.0 or tier == layout.tier(1.0):
        raise PlanError(
            f"{layout.arch}: {tier.id} cannot have a head of its own with {classes} labels; shallower tiers of width 1"
            " can, and the head of the whole model is that of its setting `classes`"
        )
    outside = [
        item.name
        for item in (*layout.parameters, *layout.base)
        if (item.block != HEAD or item in layout.base)
        and any(dim.axis in layout.label_axes for dim in item.dims)
    ]
    if outside:
        raise PlanError(
            f"{layout.arch}: {outside[0]} goes with the labels but is not part of a head that trains, so no tier can"
            " have labels of its own"
        )
