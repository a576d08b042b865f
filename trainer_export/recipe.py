"""The training recipe: loss and optimizer as pure functions, traced into the train graph.

The loss is the label-masked cross entropy of HeteroFL (Diao, Ding, Tarokh, ICLR 2021; METHODS 1.5): logits of labels
that a device does not have are set to zero, not to minus infinity. The optimizer is SGD with PyTorch's semantics of
momentum and weight decay, after clipping the global norm of the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fleet_protocol.errors import ConfigError
from fleet_protocol.manifest import RecipeSpec
from trainer_export.proximal import proximal_gradients

__all__ = [
    "Pull",
    "Recipe",
    "clip_scale",
    "correct_count",
    "label_weights",
    "loss_and_logit_gradient",
    "loss_sum",
    "one_hot",
    "sgd_step",
]

_SMALL = 8192  # numbers up to which a tensor joins the others; copying it costs less than six more operators


@dataclass(frozen=True)
class Recipe:
    """What one training step does; the learning rate and the label mask are inputs of the graph.

    Attributes:
        momentum: of the gradient; 0 for none, then there is no optimizer state.
        weight_decay: added to the clipped gradient, times the parameter; 0 for none.
        clip_norm: largest global norm of the gradient; None for no clipping.
        proximal: whether the graph takes anchors and the strength mu of FedProx's proximal term.

    Raises:
        ConfigError: a number is out of its range.
    """

    momentum: float = 0.9
    weight_decay: float = 5e-4
    clip_norm: float | None = 1.0
    proximal: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum {self.momentum} is outside [0, 1)")
        if not (self.weight_decay >= 0 and math.isfinite(self.weight_decay)):
            raise ConfigError(f"weight_decay {self.weight_decay} is negative or not finite")
        if self.clip_norm is not None and not (self.clip_norm > 0 and math.isfinite(self.clip_norm)):
            raise ConfigError(f"clip_norm {self.clip_norm} is not a positive number; leave it out for no clipping")

    @property
    def has_state(self) -> bool:
        """Whether the optimizer keeps a tensor per parameter."""
        return self.momentum > 0

    def spec(self) -> RecipeSpec:
        """This recipe as the manifest states it."""
        return RecipeSpec(
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            clip_norm=self.clip_norm,
            proximal=self.proximal,
        )


def loss_and_logit_gradient(logits: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross entropy of a batch, and its gradient in closed form.

    Args:
        logits: float32 [batch, classes], or [batch, tokens, classes].
        y: labels, int64 [batch] or [batch, tokens]. Of several labels of a sample, a negative one counts for nothing.
        mask: 1 for labels the device has, else 0, float32 [classes]; all ones for the plain loss.

    Returns:
        The loss, float32 [], a mean over the labels that count (0 if none does), and the gradient with respect to
        ``logits``: ``(softmax - one_hot) * mask / count``, 0 where the label does not count.
    """
    masked = logits * mask
    chosen = one_hot(y, logits.shape[-1])
    losses = -(torch.log_softmax(masked, -1) * chosen).sum(-1)
    error = torch.softmax(masked, -1) - chosen
    weights = label_weights(y)
    if weights is None:
        return losses.mean(), error / logits.shape[0] * mask
    return (losses * weights).sum(), error * weights[..., None] * mask


def loss_sum(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Sum of the cross entropies of a batch, float32 []; arguments as for :func:`loss_and_logit_gradient`."""
    masked = logits * mask
    return -(torch.log_softmax(masked, -1) * one_hot(y, logits.shape[-1])).sum()


def correct_count(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """How many labels are the largest (masked) logit of their place, int64 []."""
    masked = logits * mask
    return (masked.argmax(-1) == y).to(torch.int64).sum()


def one_hot(y: Tensor, classes: int) -> Tensor:
    """Labels as float32 [batch, classes] or [batch, tokens, classes]; all zero where a label is negative."""
    return (y[..., None] == torch.arange(classes)).to(torch.float32)


def label_weights(y: Tensor) -> Tensor | None:
    """What each label weighs in the mean of a batch.

    Args:
        y: labels, int64 [batch] or [batch, tokens].

    Returns:
        float32 of the shape of y: 1 over the number of labels that count, 0 for a negative one. None with one label
        per sample, where all count alike.
    """
    if y.dim() == 1:
        return None
    counted = (y >= 0).to(torch.float32)
    return counted / torch.clamp(counted.sum(), min=1.0)


def clip_scale(gradients: Sequence[Tensor], clip_norm: float) -> Tensor:
    """The factor that brings the global norm of all gradients to at most ``clip_norm``, float32 []."""
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
    return torch.clamp(clip_norm / (norm + 1e-6), max=1.0)


@dataclass(frozen=True)
class Pull:
    """The proximal term of a step.

    Attributes:
        anchors: the weights the device was sent, in parameter order.
        mu: strength, float32 [].
    """

    anchors: Sequence[Tensor]
    mu: Tensor


def sgd_step(
    parameters: Sequence[Tensor],
    states: Sequence[Tensor],
    gradients: Sequence[Tensor],
    lr: Tensor,
    recipe: Recipe,
    pull: Pull | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """One step of the optimizer.

    Small tensors are joined to one and taken apart again, because each operator costs a few microseconds to start,
    more than it takes to work on a bias.

    Args:
        parameters: float32, any shapes.
        states: momentum buffers in the same order; empty without momentum.
        gradients: in the same order.
        lr: learning rate, float32 [].
        recipe: the numbers.
        pull: added to the gradient before it is clipped; None for no proximal term.

    Returns:
        New parameters and new states.
    """
    groups = _groups(parameters)
    joined = [[_join([kind[i] for i in group]) for group in groups] for kind in (parameters, gradients)]
    buffers = [_join([states[i] for i in group]) for group in groups] if recipe.has_state else []
    if pull is not None:
        anchors = [_join([pull.anchors[i] for i in group]) for group in groups]
        joined[1] = proximal_gradients(joined[1], joined[0], anchors, pull.mu)
    scale = clip_scale(joined[1], recipe.clip_norm) if recipe.clip_norm is not None else None
    new_parameters: dict[int, Tensor] = {}
    new_states: dict[int, Tensor] = {}
    for place, group in enumerate(groups):
        parameter, update = joined[0][place], joined[1][place]
        if scale is not None:
            update = update * scale
        if recipe.weight_decay:
            update = update + parameter * recipe.weight_decay
        if recipe.has_state:
            update = buffers[place] * recipe.momentum + update
            new_states.update(zip(group, _split(update, [states[i] for i in group]), strict=True))
        moved = parameter - update * lr
        new_parameters.update(zip(group, _split(moved, [parameters[i] for i in group]), strict=True))
    order = range(len(parameters))
    return [new_parameters[i] for i in order], [new_states[i] for i in order if recipe.has_state]


def _groups(parameters: Sequence[Tensor]) -> list[list[int]]:
    """Places of tensors to work on as one.

    Small ones that differ in the first size only, so that joining them along it needs no reshape; each other alone.
    """
    groups: dict[object, list[int]] = {}
    for i, parameter in enumerate(parameters):
        joins = parameter.dim() > 0 and parameter.numel() <= _SMALL
        groups.setdefault(tuple(parameter.shape[1:]) if joins else i, []).append(i)
    return list(groups.values())


def _join(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _split(joined: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    return [joined] if len(like) == 1 else list(torch.split(joined, [t.shape[0] for t in like]))
