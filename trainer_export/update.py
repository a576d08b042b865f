"""One step of an optimizer on all parameters: proximal term, clipping, the optimizer's rule.

Small tensors are joined and split again, because starting an operator takes a few microseconds,
more than its work on a bias. All functions are pure and traceable.
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

# Largest number of elements of a joined tensor; copying it costs less than six more operators.
_SMALL = 8192


@dataclass(frozen=True)
class TrainedTensors:
    """All values that a step changes.

    Attributes:
        parameters: float32, any shapes.
        states: states of the optimizer by name, each in the order of the parameters.
        step: number of steps so far, float32 []; None for an optimizer without a step counter.
    """

    parameters: Sequence[Tensor]
    states: Mapping[str, Sequence[Tensor]]
    step: Tensor | None = None

    @classmethod
    def from_tensors(
        cls,
        tensors: Sequence[Tensor],
        optimizer: Optimizer,
    ) -> "TrainedTensors":
        """Read the input tensors of a graph.

        Parameters come first, then the states as `Optimizer.state_specs` orders them.
        """
        kinds = [state.name for state in optimizer.states]
        # Every state has as many tensors as there are parameters, so the numbers need not be passed
        # on.
        count = (len(tensors) - optimizer.counts_steps) // (1 + len(kinds))
        states = {}
        for position, name in enumerate(kinds, 1):
            states[name] = tensors[count * position : count * (position + 1)]
        step = tensors[-1] if optimizer.counts_steps else None
        return cls(tensors[:count], states, step)

    def tensors(self) -> list[Tensor]:
        """Return the tensors of a graph, the inverse of :meth:`from_tensors`."""
        tensors = list(self.parameters)
        for kind in self.states.values():
            tensors += kind
        if self.step is not None:
            tensors.append(self.step)
        return tensors

    def only(self, places: Sequence[int]) -> "TrainedTensors":
        """Return the values of some of the parameters."""
        states = {}
        for name, kind in self.states.items():
            states[name] = _at(places, kind)
        return TrainedTensors(_at(places, self.parameters), states, self.step)

    def with_moved(
        self,
        moved: "TrainedTensors",
        places: Sequence[int],
    ) -> "TrainedTensors":
        """Return all values after some of the parameters were stepped.

        Args:
            moved: the stepped result of :meth:`only`.
            places: places of its parameters.
        """
        parameters = list(self.parameters)
        _put(parameters, places, moved.parameters)
        states = {}
        for name, kind in self.states.items():
            states[name] = list(kind)
        for name, kind in states.items():
            _put(kind, places, moved.states[name])
        return TrainedTensors(parameters, states, moved.step)


def _at(places: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensors[place] for place in places]


def _put(
    tensors: list[Tensor],
    places: Sequence[int],
    new: Sequence[Tensor],
) -> None:
    for place, tensor in zip(places, new, strict=True):
        tensors[place] = tensor


@dataclass(frozen=True)
class Pull:
    """The proximal term.

    Attributes:
        anchors: the weights that the server sent, in parameter order.
        mu: its strength, float32 [].
    """

    anchors: Sequence[Tensor]
    mu: Tensor


def clip_scale(gradients: Sequence[Tensor], clip_norm: float) -> Tensor:
    """Return the factor, float32 [], that brings the norm of all gradients to a bound at most."""
    # A norm of norms: no tensor of all gradients is made.
    norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])
    norm = torch.linalg.vector_norm(norms)
    # The 1e-6 of torch.nn.utils.clip_grad_norm_, whose results these are compared with.
    return torch.clamp(clip_norm / (norm + 1e-6), max=1.0)


def update(
    trained: TrainedTensors,
    gradients: Sequence[Tensor],
    lr: Tensor,
    recipe: Recipe,
    pull: Pull | None = None,
) -> TrainedTensors:
    """Return the new values of `trained` after one step of the optimizer.

    The pull of the proximal term is added to the gradient before it is clipped.
    """
    groups = _groups(trained.parameters)
    parameters = _joined(trained.parameters, groups)
    slopes = _joined(gradients, groups)
    states = {}
    for name, kind in trained.states.items():
        states[name] = _joined(kind, groups)
    if pull is not None:
        slopes = proximal_gradients(slopes, parameters, _joined(pull.anchors, groups), pull.mu)
    # After the pull: the bound holds for all that moves the weights.
    slopes, scale = _clipped(slopes, recipe)
    # Counted before the rule, since bias corrections divide by 1 - beta^step, which is 0 at 0.
    step = None if trained.step is None else trained.step + 1

    moved: list[Tensor] = list(trained.parameters)
    kept = {}
    for name, kind in trained.states.items():
        kept[name] = list(kind)
    for position, group in enumerate(groups):
        slope = slopes[position] if scale is None else slopes[position] * scale
        state = {}
        for name, kind in states.items():
            state[name] = kind[position]
        slot = Slot(parameters[position], slope, state, step)
        direction, new_states = recipe.optimizer.direction(slot)
        like = _at(group, trained.parameters)
        for name, new_state in new_states.items():
            _put(kept[name], group, _split(new_state, like))
        _put(moved, group, _split(slot.parameter - direction * lr, like))
    return TrainedTensors(moved, kept, step)


def _clipped(slopes: list[Tensor], recipe: Recipe) -> tuple[list[Tensor], Tensor | None]:
    """Return gradients clipped by value, and the factor that clips their norm, if any.

    The factor is applied later, group by group.
    """
    bound = recipe.clip_value
    if bound is not None:
        slopes = [torch.clamp(slope, -bound, bound) for slope in slopes]
    if recipe.clip_norm is None:
        return slopes, None
    return slopes, clip_scale(slopes, recipe.clip_norm)


def changing_ports(
    shapes: Mapping[str, tuple[int, ...]],
    recipe: Recipe,
) -> tuple[Port, ...]:
    """Return ports of all values that a step changes.

    These are parameters, states of the optimizer, and gradient sums of micro-batches.
    """
    specs = recipe.state_specs(shapes)
    states = []
    for spec in specs:
        states.append(Port(state_input(spec.name), spec.dtype, spec.shape))
    return (*parameter_ports(shapes), *states)


def extra_ports(
    shapes: Mapping[str, tuple[int, ...]],
    recipe: Recipe,
) -> tuple[Port, ...]:
    """Return ports for the proximal term and for micro-batches.

    The term needs the sent weights and its strength.
    """
    ports: list[Port] = []
    if recipe.proximal:
        for name, shape in shapes.items():
            ports.append(Port(anchor_input(name), "float32", shape))
        ports.append(Port("mu", "float32", ()))
    if recipe.accumulate:
        ports += [Port("share", "float32", ()), Port("last", "float32", ())]
    return tuple(ports)


def stepped(
    changing: Sequence[Tensor],
    gradients: Mapping[int, Tensor],
    lr: Tensor,
    extras: Sequence[Tensor],
    recipe: Recipe,
) -> list[Tensor]:
    """Return the new values of everything that a graph changes.

    With ``recipe.accumulate`` a batch may consist of micro-batches: gradients are summed, weighted
    by their shares of the batch. Only the last micro-batch changes anything else and resets the
    sums to zero.

    Args:
        changing: the tensors of `changing_ports`.
        gradients: gradients by the places of their parameters.
        lr: float32 [].
        extras: the tensors of `extra_ports`.
        recipe: the recipe.
    """
    optimizer = recipe.optimizer
    kinds = 1 + len(optimizer.states) + recipe.accumulate
    count = (len(changing) - optimizer.counts_steps) // kinds
    # Frozen parameters and those that the loss does not reach have no gradient, and no step.
    places = list(gradients)
    slopes = list(gradients.values())
    pull = Pull(_at(places, extras), extras[count]) if recipe.proximal else None
    if not recipe.accumulate:
        trained = TrainedTensors.from_tensors(changing, optimizer)
        moved = update(trained.only(places), slopes, lr, recipe, pull)
        return trained.with_moved(moved, places).tensors()

    before = changing[:-count]
    sums = changing[-count:]
    trained = TrainedTensors.from_tensors(before, optimizer)
    share = extras[-2]
    # As a tensor: the graph is the same for every piece, and chooses at run time.
    last = extras[-1] > 0
    summed = {}
    for place, slope in gradients.items():
        summed[place] = sums[place] + slope * share
    moved = update(
        trained.only(places),
        list(summed.values()),
        lr,
        recipe,
        pull,
    )
    after = trained.with_moved(moved, places).tensors()
    results = []
    for new, old in zip(after, before, strict=True):
        # Values that no step changes need no choice between two equal tensors.
        results.append(new if new is old else torch.where(last, new, old))
    for place, old in enumerate(sums):
        if place in summed:
            # Zeros after the last piece, so that the next batch starts without a call in between.
            results.append(
                torch.where(
                    last,
                    torch.zeros_like(old),
                    summed[place],
                )
            )
        else:
            results.append(old)
    return results


def _groups(parameters: Sequence[Tensor]) -> list[list[int]]:
    """Return groups of places whose tensors are processed together.

    A group has small tensors that differ only in the first size, so that joining them needs no
    reshape. Every other tensor is its own group.
    """
    groups: dict[object, list[int]] = {}
    for place, parameter in enumerate(parameters):
        key: object = place
        if parameter.dim() > 0 and parameter.numel() <= _SMALL:
            # A norm's scale and a layer's bias have nothing behind the first size, so all vectors
            # of a model are one group.
            key = tuple(parameter.shape[1:])
        groups.setdefault(key, []).append(place)
    return list(groups.values())


def _joined(tensors: Sequence[Tensor], groups: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return one tensor for each group."""
    joined = []
    for group in groups:
        members = _at(group, tensors)
        joined.append(members[0] if len(members) == 1 else torch.cat(members))
    return joined


def _split(joined: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the separate tensors of a joined one."""
    if len(like) == 1:
        return [joined]
    return list(torch.split(joined, [tensor.shape[0] for tensor in like]))
