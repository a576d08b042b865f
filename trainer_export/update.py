"""One step of an optimizer on all parameters of a model: proximal term, clipping, the optimizer's
rule.

Small tensors are joined to one and taken apart again, because each operator costs a few
microseconds to start, more than it takes to work on a bias. Everything is pure and traceable.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fleet_protocol.manifest import anchor_input, state_input
from trainer_export.graph import Port
from trainer_export.model_inputs import parameter_ports
from trainer_export.optimizer import Optimizer, Slot
from trainer_export.proximal import proximal_gradients
from trainer_export.recipe import Recipe

# numbers up to which a tensor joins the others; copying it costs less than six more operators
_SMALL = 8192


@dataclass(frozen=True)
class Trained:
    """Everything that a step changes."""

    parameters: Sequence[Tensor]  # float32, any shapes
    states: Mapping[
        str, Sequence[Tensor]
    ]  # of the optimizer, by name, each in the order of the parameters
    step: Tensor | None = (
        None  # number of steps so far, float32 []; None for an optimizer that counts none
    )

    @classmethod
    def of(cls, tensors: Sequence[Tensor], optimizer: Optimizer) -> "Trained":
        """Read the tensors that a graph takes: parameters, then the states as
        `Optimizer.state_specs` orders them.
        """
        kinds = [state.name for state in optimizer.states]
        count = (len(tensors) - optimizer.counts_steps) // (1 + len(kinds))
        states = {name: tensors[count * (i + 1) : count * (i + 2)] for i, name in enumerate(kinds)}
        return cls(tensors[:count], states, tensors[-1] if optimizer.counts_steps else None)

    def tensors(self) -> list[Tensor]:
        """The reverse of :meth:`of`."""
        counter = [] if self.step is None else [self.step]
        return [
            *self.parameters,
            *(tensor for kind in self.states.values() for tensor in kind),
            *counter,
        ]

    def only(self, places: Sequence[int]) -> "Trained":
        """The part that belongs to some of the parameters."""
        states = {name: [kind[i] for i in places] for name, kind in self.states.items()}
        return Trained([self.parameters[i] for i in places], states, self.step)

    def with_moved(self, moved: "Trained", places: Sequence[int]) -> "Trained":
        """The whole after a part of it was stepped: that of some places, as :meth:`only` gave it."""

        def placed(old: Sequence[Tensor], new: Sequence[Tensor]) -> list[Tensor]:
            stepped = dict(zip(places, new, strict=True))
            return [stepped.get(i, tensor) for i, tensor in enumerate(old)]

        states = {name: placed(kind, moved.states[name]) for name, kind in self.states.items()}
        return Trained(placed(self.parameters, moved.parameters), states, moved.step)


@dataclass(frozen=True)
class Pull:
    """The proximal term: the weights the device was sent, in parameter order, and its strength,
    float32 [].
    """

    anchors: Sequence[Tensor]
    mu: Tensor


def clip_scale(gradients: Sequence[Tensor], clip_norm: float) -> Tensor:
    """The factor that brings the global norm of all gradients to at most ``clip_norm``, float32 []."""
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
    return torch.clamp(clip_norm / (norm + 1e-6), max=1.0)


def update(
    trained: Trained,
    gradients: Sequence[Tensor],
    lr: Tensor,
    recipe: Recipe,
    pull: Pull | None = None,
) -> Trained:
    """One step of the optimizer: what takes the place of `trained`.

    The pull of the proximal term is added to the gradient before it is clipped.
    """
    groups = _groups(trained.parameters)
    parameters, slopes = (_joined(kind, groups) for kind in (trained.parameters, gradients))
    states = {name: _joined(kind, groups) for name, kind in trained.states.items()}
    if pull is not None:
        slopes = proximal_gradients(slopes, parameters, _joined(pull.anchors, groups), pull.mu)
    if recipe.clip_value is not None:
        slopes = [torch.clamp(slope, -recipe.clip_value, recipe.clip_value) for slope in slopes]
    scale = clip_scale(slopes, recipe.clip_norm) if recipe.clip_norm is not None else None
    step = None if trained.step is None else trained.step + 1
    moved: dict[int, Tensor] = {}
    kept: dict[str, dict[int, Tensor]] = {name: {} for name in states}
    for place, group in enumerate(groups):
        slope = slopes[place] if scale is None else slopes[place] * scale
        slot = Slot(
            parameters[place],
            slope,
            {name: kind[place] for name, kind in states.items()},
            step,
        )
        direction, new_states = recipe.optimizer.direction(slot)
        like = [trained.parameters[i] for i in group]
        for name, state in new_states.items():
            kept[name].update(zip(group, _split(state, like), strict=True))
        moved.update(zip(group, _split(slot.parameter - direction * lr, like), strict=True))
    order = range(len(trained.parameters))
    return Trained(
        [moved[i] for i in order],
        {name: [kind[i] for i in order] for name, kind in kept.items()},
        step,
    )


def changing_ports(shapes: Mapping[str, tuple[int, ...]], recipe: Recipe) -> tuple[Port, ...]:
    """Everything that a step changes: parameters, states of the optimizer, sums of a batch that
    comes in pieces.
    """
    return (
        *parameter_ports(shapes),
        *(
            Port(state_input(spec.name), spec.dtype, spec.shape)
            for spec in recipe.state_specs(shapes)
        ),
    )


def extra_ports(shapes: Mapping[str, tuple[int, ...]], recipe: Recipe) -> tuple[Port, ...]:
    """What a step takes for the proximal term (the weights sent, and its strength), and to take a
    batch in pieces.
    """
    anchors = tuple(Port(anchor_input(name), "float32", shape) for name, shape in shapes.items())
    return (
        *((*anchors, Port("mu", "float32", ())) if recipe.proximal else ()),
        *((Port("share", "float32", ()), Port("last", "float32", ())) if recipe.accumulate else ()),
    )


def stepped(
    changing: Sequence[Tensor],
    gradients: Mapping[int, Tensor],
    lr: Tensor,
    extras: Sequence[Tensor],
    recipe: Recipe,
) -> list[Tensor]:
    """What takes the place of everything that a graph changes.

    With ``recipe.accumulate`` a batch may come in pieces: gradients are summed by their shares of
    the batch, and only the last piece moves anything else, which leaves the sums at zero. What
    changes is as `changing_ports` names it, the extras as `extra_ports` does; gradients are by the
    places of those parameters that have one.
    """
    optimizer = recipe.optimizer
    count = (len(changing) - optimizer.counts_steps) // (
        1 + len(optimizer.states) + recipe.accumulate
    )
    held, sums = (changing[:-count], changing[-count:]) if recipe.accumulate else (changing, ())
    trained = Trained.of(held, optimizer)
    places = list(gradients)
    slopes = list(gradients.values())
    pull = Pull([extras[i] for i in places], extras[count]) if recipe.proximal else None
    if not recipe.accumulate:
        moved = update(trained.only(places), slopes, lr, recipe, pull)
        return trained.with_moved(moved, places).tensors()
    share = extras[-2]
    last = extras[-1] > 0
    slopes = [sums[i] + slope * share for i, slope in zip(places, slopes, strict=True)]
    moved = update(trained.only(places), slopes, lr, recipe, pull)
    after = trained.with_moved(moved, places).tensors()
    left = dict(zip(places, slopes, strict=True))
    return [
        *(
            new if new is old else torch.where(last, new, old)
            for new, old in zip(after, held, strict=True)
        ),
        *(
            torch.where(last, torch.zeros_like(old), left[i]) if i in left else old
            for i, old in enumerate(sums)
        ),
    ]


def _groups(parameters: Sequence[Tensor]) -> list[list[int]]:
    """Places of tensors to work on as one.

    Small ones that differ in the first size only, so that joining them along it needs no reshape;
    each other alone.
    """
    groups: dict[object, list[int]] = {}
    for i, parameter in enumerate(parameters):
        joins = parameter.dim() > 0 and parameter.numel() <= _SMALL
        groups.setdefault(tuple(parameter.shape[1:]) if joins else i, []).append(i)
    return list(groups.values())


def _joined(tensors: Sequence[Tensor], groups: Sequence[Sequence[int]]) -> list[Tensor]:
    return [
        tensors[group[0]] if len(group) == 1 else torch.cat([tensors[i] for i in group])
        for group in groups
    ]


def _split(joined: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    return [joined] if len(like) == 1 else list(torch.split(joined, [t.shape[0] for t in like]))
