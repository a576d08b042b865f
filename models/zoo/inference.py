"""Infers the layout of a model by perturbation: rebuild it with one axis larger and see what grows.

So a user writes a plain torch module and only asks its `Cut` for sizes. All builds but that of the initial weights
happen on torch's meta device and cost no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedParameter

from fleet_protocol.errors import ConfigError
from models.axes import Axis, AxisKind
from models.cut import CLASSES, FIXED_PREFIX, Cut
from models.layout import HEAD, STEM, Dim, Layout, Parameter, Statistic, block_name
from models.registry import Architecture, call_builder
from models.zoo.layers import StaticBatchNorm

__all__ = ["infer_layout", "initial_weights"]

Shapes = dict[str, tuple[int, ...]]


def initial_weights(
    arch: Architecture, settings: Mapping[str, Any] | None = None, seed: int = 0
) -> dict[str, NDArray[np.float32]]:
    """Draw the initial weights of a global model; the global random state of torch is left as it was.

    Args:
        arch: the architecture.
        settings: settings that differ from the defaults.
        seed: seed of the draw.

    Returns:
        Float32 arrays in registration order; a function of the arguments for one release of torch.

    Raises:
        ConfigError: if a setting is unknown or the model has a parameter that is not float32.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = _module(arch, Cut(), settings)
    weights = {name: value.detach().numpy().copy() for name, value in module.named_parameters()}
    for name, value in weights.items():
        if value.dtype != np.float32:
            raise ConfigError(f"{arch.name}: parameter {name} is {value.dtype}; parameters must be float32")
    return weights


def infer_layout(arch: Architecture, settings: Mapping[str, Any] | None = None) -> Layout:
    """Infer the layout of an architecture's global model; see `models.registry.infer_layout`."""
    cut = Cut()
    module = _meta_module(arch, cut, settings)
    _refuse_unsliceable(arch, module)
    shapes = _shapes(module)
    axes = dict(cut.axes)
    if CLASSES not in axes:
        raise ConfigError(f"{arch.name} never asked for cut.classes(n); its classifier must, or labels have no axis")
    dims = _dims(arch, settings, shapes, axes)
    depth = 1 if cut.blocks is None else cut.blocks
    blocks = _head_from_labels(shapes, dims) if cut.blocks is None else _blocks_by_depth(arch, settings, shapes, depth)
    full = arch.settings(settings)
    return Layout(
        arch=arch.name,
        settings=full,
        axes=axes,
        parameters=tuple(Parameter(name, shape, tuple(dims[name]), blocks[name]) for name, shape in shapes.items()),
        statistics=tuple(
            Statistic(name, tuple(dims[f"{name}.weight"]), blocks[f"{name}.weight"])
            for name, layer in module.named_modules()
            if isinstance(layer, StaticBatchNorm)
        ),
        depth=depth,
        depths=tuple(range(1, depth + 1)),
        label_axes=cut.label_axes,
        input_shape=tuple(full["input_shape"]),
        input_dtype=arch.input_dtype,
        classes=axes[CLASSES].size,
    )


def _module(arch: Architecture, cut: Cut, settings: Mapping[str, Any] | None) -> nn.Module:
    module = call_builder(arch, cut, settings)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{arch.name} must return a torch module, not {type(module).__name__}")
    return module


def _meta_module(arch: Architecture, cut: Cut, settings: Mapping[str, Any] | None) -> nn.Module:
    with torch.device("meta"):
        return _module(arch, cut, settings)


def _shapes(module: nn.Module) -> Shapes:
    return {name: tuple(value.shape) for name, value in module.named_parameters()}


def _refuse_unsliceable(arch: Architecture, module: nn.Module) -> None:
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm):
            raise ConfigError(
                f"{arch.name}: {name} is a {type(layer).__name__}, whose running averages cannot be merged across"
                " widths; use StaticBatchNorm from models.zoo.layers"
            )
    for name, value in module.named_parameters():
        if isinstance(value, UninitializedParameter):
            raise ConfigError(f"{arch.name}: parameter {name} has no shape yet; use no lazy layers")


def _dims(
    arch: Architecture, settings: Mapping[str, Any] | None, shapes: Shapes, axes: dict[str, Axis]
) -> dict[str, list[Dim]]:
    """Find the axis of every dimension; adds the fixed axes to `axes`."""
    moved: dict[tuple[str, int], Dim] = {}
    for axis in list(axes.values()):
        grown = _shapes(_meta_module(arch, Cut(enlarge=axis.name), settings))
        touched = _growth(arch, shapes, grown, axis)
        if not touched:
            raise ConfigError(f"{arch.name}: no parameter grows with axis {axis.name}; use the size the cut returns")
        for (name, position), inner in touched.items():
            other = moved.get((name, position))
            if other is not None:
                raise ConfigError(
                    f"{arch.name}: dimension {position} of {name} grows with both {other.axis} and {axis.name};"
                    " a dimension carries one axis, so give each part a parameter of its own"
                )
            moved[name, position] = Dim(axis.name, inner)
    dims: dict[str, list[Dim]] = {}
    for name, shape in shapes.items():
        dims[name] = []
        for position, size in enumerate(shape):
            dim = moved.get((name, position))
            if dim is None:
                fixed = Axis(f"{FIXED_PREFIX}{size}", size, AxisKind.FIXED)
                axes[fixed.name] = fixed
                dim = Dim(fixed.name)
            dims[name].append(dim)
    return dims


def _growth(arch: Architecture, shapes: Shapes, grown: Shapes, axis: Axis) -> dict[tuple[str, int], int]:
    """Map each dimension that one more unit makes larger to the positions that each unit has in it."""
    if [(name, len(shape)) for name, shape in shapes.items()] != [(name, len(shape)) for name, shape in grown.items()]:
        raise ConfigError(f"{arch.name}: its parameters change with the size of {axis.name}; only shapes may")
    touched = {}
    for name, shape in shapes.items():
        for position, (before, after) in enumerate(zip(shape, grown[name], strict=True)):
            if before == after:
                continue
            inner, rest = divmod(after - before, axis.groups)
            where = f"{arch.name}: dimension {position} of {name} has {before} entries"
            if rest or inner < 1 or before != axis.size * inner:
                raise ConfigError(
                    f"{where} and grows to {after} with one more unit of {axis.name} ({axis.size} units), which is no"
                    " whole number of entries for each; keep what else is joined to it in a parameter of its own"
                )
            if axis.groups > 1 and inner > 1:
                raise ConfigError(
                    f"{where}, {inner} for each unit of the heads {axis.name}; give queries, keys and values a"
                    " projection each instead of a fused one"
                )
            touched[name, position] = inner
    return touched


def _head_from_labels(shapes: Shapes, dims: Mapping[str, list[Dim]]) -> dict[str, str]:
    """Without a depth unit: the head starts at the first parameter that has a row for each label."""
    blocks: dict[str, str] = {}
    current = STEM
    for name in shapes:
        if any(dim.axis == CLASSES for dim in dims[name]):
            current = HEAD
        blocks[name] = current
    return blocks


def _blocks_by_depth(
    arch: Architecture, settings: Mapping[str, Any] | None, shapes: Shapes, depth: int
) -> dict[str, str]:
    """With a depth unit: a parameter belongs to the first depth that has it."""
    first: dict[str, int] = {}
    for number in range(depth + 1):
        found = _shapes(_meta_module(arch, Cut(depth=number), settings))
        odd = [name for name, shape in found.items() if shapes.get(name) != shape]
        if odd or not first.keys() <= found.keys():
            name = odd[0] if odd else min(first.keys() - found.keys())
            raise ConfigError(
                f"{arch.name}: parameter {name} of depth {number} is not the same in a deeper model;"
                " blocks must be alike and be added on top"
            )
        for name in found:
            first.setdefault(name, number)
    in_blocks = [position for position, name in enumerate(shapes) if first[name] > 0]
    if len({first[name] for name in shapes} - {0}) != depth:
        raise ConfigError(f"{arch.name}: asked for a depth of {depth}, but not every block has parameters")
    return {
        name: block_name(first[name]) if first[name] else (STEM if position < in_blocks[0] else HEAD)
        for position, name in enumerate(shapes)
    }
