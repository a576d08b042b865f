"""Exchanging units: a model run with the units of some axes permuted in every parameter that
carries them.

What a model computes from parameters whose units changed places tells where the units are. Outputs
must stay, and the gradients of one training step must change places as the parameters did.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from fleet_protocol.errors import ConfigError
from models.axes import Axis
from models.dims import Dim
from models.inputs import Row
from models.zoo.dropout import NoiseLayer
from models.zoo.layers import set_mode

Dims = Mapping[str, Sequence[Dim | None]]
"""The dimensions of each parameter; None where it is not known yet."""

State = Mapping[str, Tensor]

_SAMPLES = 2
_SPREAD = 0.1  # of vectors, so that no two units of a norm are alike
_LEVEL = 0.5
_SEED = 7
_DRAWN = 65_537
CHECKPOINTS = "a checkpoint recomputes with other parameters (leave torch.utils.checkpoint out)"
"""Said where a model keeps its activations in its own way."""


@dataclass(frozen=True)
class Run:
    """Every tensor that a model returned, float32, and gradients of a fixed random sum of them, if
    asked for.
    """

    outputs: tuple[Tensor, ...]
    gradients: State


@dataclass(frozen=True)
class Subject:
    """A model to run with random parameters, no two units alike, and its samples.

    Its norms are by the batch, and no layer of ours draws noise; the buffers are computed with
    instead of its own.
    """

    module: nn.Module
    state: State
    x: Tensor
    training: bool = False
    buffers: State = field(default_factory=dict)

    def run(self, state: State | None = None, *, gradients: bool = True) -> Run:
        """Compute outputs and gradients, or outputs alone, with some parameters, its own by
        default.
        """
        for layer in self.module.modules():
            layer.training = self.training and not isinstance(layer, NoiseLayer)
        if not gradients:
            with torch.no_grad():
                held = {**self.buffers, **(state or self.state)}
                return Run(tuple(_tensors(functional_call(self.module, held, (self.x,)))), {})
        leaves = {
            name: value.detach().requires_grad_() for name, value in (state or self.state).items()
        }
        with torch.autograd.graph.disable_saved_tensors_hooks(CHECKPOINTS):
            outputs = tuple(_tensors(functional_call(self.module, leaves, (self.x,))))
        total = sum((value * noise(value)).sum() for value in outputs)
        if not isinstance(total, Tensor) or not total.requires_grad:
            return Run(
                outputs,
                {name: torch.zeros_like(value) for name, value in leaves.items()},
            )
        found = torch.autograd.grad(
            total, list(leaves.values()), allow_unused=True, materialize_grads=True
        )
        return Run(
            tuple(value.detach() for value in outputs),
            dict(zip(leaves, found, strict=True)),
        )


def subject_of(module: nn.Module, x: Tensor) -> Subject:
    """Make a subject of a model with random parameters.

    On the meta device its buffers have no defined content.
    """
    state = {}
    is_meta = any(value.is_meta for value in module.parameters())
    if is_meta:
        module = module.to_empty(device="cpu")
    for name, value in module.named_parameters():
        drawn = value.detach()
        if value.dim() < 2:
            drawn = (torch.full_like(drawn, _LEVEL) if is_meta else drawn) + _SPREAD * noise(value)
        elif is_meta or bool((drawn == drawn.flatten()[0]).all()):
            drawn = noise(value) / math.sqrt(max(1, value[0].numel()))
        state[name] = drawn
    return Subject(set_mode(module, "statistics"), state, x)


def vocabulary_of(module: nn.Module) -> int:
    """The number of tokens that every embedding of a model knows."""
    return min(
        (item.num_embeddings for item in module.modules() if isinstance(item, nn.Embedding)),
        default=2,
    )


def samples(
    module: nn.Module,
    row: Row,
    count: int = _SAMPLES,
    scale: float = 1.0,
    shift: float = 0.0,
) -> Tensor:
    """A few random samples for a model: numbers of a deviation and a mean, or tokens that all its
    embeddings know.

    A scale below 1 is also the share of the tokens that may come, from the first.
    """
    generator = torch.Generator().manual_seed(_SEED)
    known = max(1, int(vocabulary_of(module) * min(scale, 1.0)))
    if row.dtype == "float32":
        numbers = torch.randn((count, *row.shape), generator=generator) * scale + shift
        return row.with_tokens(numbers, known)  # type: ignore[no-any-return]
    return torch.randint(0, known, (count, *row.shape), generator=generator)


def stretched(subject: Subject, x: Tensor, gain: float, dtype: torch.dtype) -> Subject:
    """A model with other samples, and parameters larger by a gain, in some precision.

    To run without gradients.
    """
    state = {name: value.to(dtype) * gain for name, value in subject.state.items()}
    buffers = {
        name: value.to(dtype, copy=True)
        for name, value in subject.module.named_buffers()
        if value.is_floating_point()
    }
    return replace(
        subject,
        state=state,
        x=x.to(dtype) if x.is_floating_point() else x,
        buffers=buffers,
    )


def turned(axis: Axis, seed: int) -> NDArray[np.int64]:
    """Draw a permutation of the units of an axis that leaves none where it is: the same places in
    each group.
    """
    order = np.random.default_rng([_SEED, seed]).permutation(axis.group_size)
    places = np.empty_like(order)
    places[order] = np.roll(order, -1)
    return (np.arange(axis.groups)[:, None] * axis.group_size + places).reshape(-1)


def exchanged(
    state: State,
    dims: Dims,
    axes: Mapping[str, Axis],
    units: Mapping[str, NDArray[np.int64]],
    *,
    back: bool = False,
) -> dict[str, Tensor]:
    """Permute the units of axes in every tensor that carries them, or move them back.

    For each axis to permute, `units` names the unit that comes to each place; dimensions that are
    not known stay.
    """
    found = {}
    for name, value in state.items():
        found[name] = value
        for position, dim in enumerate(dims[name]):
            if dim is not None and any(part.axis in units for part in dim.segments):
                entries = dim.entries(axes, units)
                order = torch.from_numpy(np.argsort(entries) if back else entries)
                found[name] = found[name].index_select(position, order)
    return found


def noise(like: Tensor) -> Tensor:
    """Normal numbers of a tensor's shape.

    A large one repeats a prime number of them, which is cheaper.
    """
    generator = torch.Generator().manual_seed(_SEED + like.numel())
    count = like.numel()
    drawn = torch.randn(min(count, _DRAWN), generator=generator, device=generator.device)
    return drawn.repeat(-(-count // _DRAWN))[:count].view(like.shape)


def _tensors(value: Any) -> list[Tensor]:
    """The float tensors of whatever a model returns."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    raise ConfigError(
        f"a model must return tensors, or a tuple, list or dictionary of them, not {type(value).__name__}; leave"
        " out what is none"
    )
