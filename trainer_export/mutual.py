"""Mutual learning: the losses of FML and the step that trains a personal model and a meme on the same batch.

Tao Shen, Jie Zhang, Xinkang Jia, Fengda Zhang, Gang Huang, Pan Zhou, Kun Kuang, Fei Wu, Chao Wu: "Federated Mutual
Learning", 2020, https://arxiv.org/abs/2006.16765; METHODS 5.1 and 5.3. With p and q the softmax of the personal and the
meme logits, y the labels and B the batch:

    L_personal = alpha * CE(p, y) + (1 - alpha) * KL(q || p)        gradient through p alone
    L_meme     = beta  * CE(q, y) + (1 - beta)  * KL(p || q)        gradient through q alone
    dL_personal/dz = (alpha * (p - onehot) + (1 - alpha) * (p - q)) / B, and likewise for the meme

Both losses have one form, so one function serves both. The step is simultaneous: both models are run on the batch,
then both are stepped; neither sees the other's new weights (deep mutual learning as published elsewhere alternates).
Everything is pure and traceable; alpha, beta and the learning rates may be inputs of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer_export.recipe import Recipe, label_weights, one_hot, sgd_step

__all__ = ["Learner", "Learnt", "MutualParts", "mutual_loss_and_logit_gradient", "mutual_parts", "mutual_step"]


@dataclass(frozen=True)
class MutualParts:
    """What a mutual loss is made of.

    Attributes:
        cross_entropy: with the labels, mean over the batch, [].
        divergence: from the other model's distribution, KL(other || own), mean over the batch, [].
        own: softmax of the own logits, [batch, classes] (or [batch, tokens, classes], as the logits).
        other: softmax of the other logits, of the same shape.
    """

    cross_entropy: Tensor
    divergence: Tensor
    own: Tensor
    other: Tensor


def mutual_parts(own: Tensor, other: Tensor, y: Tensor) -> MutualParts:
    """Compute the parts of a model's mutual loss.

    Args:
        own: logits of the model that learns, float [batch, classes] or [batch, tokens, classes].
        other: logits of the model that teaches, of the same shape; taken as constants.
        y: labels, int64 [batch] or [batch, tokens]; of several, a negative one leaves its place out of both parts.
    """
    log_own, log_other = torch.log_softmax(own, -1), torch.log_softmax(other.detach(), -1)
    chosen = one_hot(y, own.shape[-1])
    taught = torch.exp(log_other)
    return MutualParts(
        cross_entropy=_mean(-(log_own * chosen).sum(-1), y),
        divergence=_mean((taught * (log_other - log_own)).sum(-1), y),
        own=torch.exp(log_own),
        other=taught,
    )


def _mean(losses: Tensor, y: Tensor) -> Tensor:
    """Over the labels that count."""
    weights = label_weights(y)
    return losses.mean() if weights is None else (losses * weights).sum()


def mutual_loss_and_logit_gradient(
    own: Tensor, other: Tensor, y: Tensor, trust: Tensor | float
) -> tuple[Tensor, Tensor]:
    """A model's mutual loss, and its gradient in closed form.

    Args:
        own: logits of the model that learns, float [batch, classes] or [batch, tokens, classes].
        other: logits of the model that teaches, of the same shape; taken as constants.
        y: labels, int64 [batch] or [batch, tokens].
        trust: share of the labels in the loss, in [0, 1], a number or float []: alpha for the personal model, beta
            for the meme. At 1 the other model does not matter.

    Returns:
        The loss, float [], and the gradient with respect to `own`, of its shape.
    """
    parts = mutual_parts(own, other, y)
    loss = parts.cross_entropy * trust + parts.divergence * (1 - trust)
    slope = (parts.own - one_hot(y, own.shape[-1])) * trust + (parts.own - parts.other) * (1 - trust)
    weights = label_weights(y)
    return loss, slope / own.shape[0] if weights is None else slope * weights[..., None]


@dataclass(frozen=True)
class Learner:
    """One of the two models of a mutual step.

    Attributes:
        call: computes logits [batch, classes] from the parameters and a batch.
        parameters: float, any shapes.
        states: momentum buffers in the same order; empty without momentum.
        trust: share of the labels in its loss; see `mutual_loss_and_logit_gradient`.
        lr: learning rate, float [].
        recipe: its optimizer.
    """

    call: Callable[[Sequence[Tensor], Tensor], Tensor]
    parameters: Sequence[Tensor]
    states: Sequence[Tensor]
    trust: Tensor | float
    lr: Tensor
    recipe: Recipe


@dataclass(frozen=True)
class Learnt:
    """A model after a mutual step.

    Attributes:
        loss: before the step, float [].
        parameters: new parameters.
        states: new momentum buffers.
    """

    loss: Tensor
    parameters: list[Tensor]
    states: list[Tensor]


def mutual_step(personal: Learner, meme: Learner, x: Tensor, y: Tensor) -> tuple[Learnt, Learnt]:
    """Train both models on one batch, simultaneously.

    Args:
        personal: the model that stays on the device.
        meme: its copy of the global model.
        x: samples, [batch, ...].
        y: labels, int64 [batch].

    Returns:
        The personal model and the meme after the step.
    """
    runs = [_run(learner, x) for learner in (personal, meme)]
    logits = [made.detach() for _, made in runs]
    learnt = [
        _step(learner, run, y, logits[1 - position])
        for position, (learner, run) in enumerate(zip((personal, meme), runs, strict=True))
    ]
    return learnt[0], learnt[1]


def _run(learner: Learner, x: Tensor) -> tuple[list[Tensor], Tensor]:
    trained = [parameter.detach().requires_grad_() for parameter in learner.parameters]
    return trained, learner.call(trained, x)


def _step(learner: Learner, run: tuple[list[Tensor], Tensor], y: Tensor, other: Tensor) -> Learnt:
    trained, logits = run
    loss, slope = mutual_loss_and_logit_gradient(logits.detach(), other, y, learner.trust)
    # A parameter that the loss does not depend on has the gradient zero: weight decay and momentum still move it.
    gradients = torch.autograd.grad(logits, trained, slope, allow_unused=True, materialize_grads=True)
    moved, kept = sgd_step(
        [parameter.detach() for parameter in trained], learner.states, gradients, learner.lr, learner.recipe
    )
    return Learnt(loss, moved, kept)
