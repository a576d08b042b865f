"""Mutual learning: the loss of FML, with which a device's two models teach each other.

Tao Shen, Jie Zhang, Xinkang Jia, Fengda Zhang, Gang Huang, Pan Zhou, Kun Kuang, Fei Wu, Chao Wu:
"Federated Mutual Learning", 2020, https://arxiv.org/abs/2006.16765; specification 5.1 and 5.3. With
p and q the softmax of the personal (own) and the meme (sent) logits, y the labels and B the batch:

    L_personal = alpha * CE(p, y) + (1 - alpha) * KL(q || p)        gradient only through p
    L_meme     = beta  * CE(q, y) + (1 - beta)  * KL(p || q)        gradient only through q
    dL_personal/dz = (alpha * (p - onehot) + (1 - alpha) * (p - q)) / B, and likewise for the meme

Both losses have one form, so one function computes both. The step is simultaneous, while published
deep mutual learning alternates; `trainer_export.pair_step` implements it for all pairs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from trainer_export.knob import Knob
from trainer_export.losses.cross_entropy import (
    label_weights,
    one_hot,
    torch_cross_entropy,
)
from trainer_export.pair_step import PairRoutine


@dataclass(frozen=True)
class MutualParts:
    """The parts of a mutual loss."""

    cross_entropy: Tensor  # cross entropy with the labels, mean over the batch, []
    # divergence from the other model's distribution, KL(other || own), mean over the batch, []
    divergence: Tensor
    # softmax of the own logits, [batch, classes] (or [batch, tokens, classes], as the logits)
    own_softmax: Tensor
    other_softmax: Tensor  # softmax of the other logits, of the same shape


def mutual_parts(own: Tensor, other: Tensor, y: Tensor) -> MutualParts:
    """Compute the parts of a model's mutual loss.

    Args:
        own: logits of the model that learns, float [batch, classes] or [batch, tokens, classes].
        other: logits of the model that teaches, of the same shape; they are constants.
        y: labels, int64 [batch] or [batch, tokens]; among several, a negative one excludes its
            place from both parts.
    """
    log_own = torch.log_softmax(own, -1)
    log_other = torch.log_softmax(other.detach(), -1)
    truth = one_hot(y, own.shape[-1])
    other_softmax = torch.exp(log_other)
    return MutualParts(
        cross_entropy=_mean(-(log_own * truth).sum(-1), y),
        divergence=_mean((other_softmax * (log_other - log_own)).sum(-1), y),
        own_softmax=torch.exp(log_own),
        other_softmax=other_softmax,
    )


def _mean(losses: Tensor, y: Tensor) -> Tensor:
    """Return the mean over the labels that are not ignored."""
    weights = label_weights(y)
    return losses.mean() if weights is None else (losses * weights).sum()


def mutual_loss_and_logit_gradient(
    own: Tensor,
    other: Tensor,
    y: Tensor,
    trust: Tensor | float,
) -> tuple[Tensor, Tensor]:
    """Compute a model's mutual loss, and its gradient in closed form.

    Args:
        own: logits of the model that learns, float [batch, classes] or [batch, tokens, classes].
        other: logits of the model that teaches, of the same shape; they are constants.
        y: labels, int64 [batch] or [batch, tokens].
        trust: weight of the labels in the loss, in [0, 1], a number or float []: alpha for the
            personal model, beta for the meme. At 1 the other model has no influence.

    Returns:
        The loss, float [], and the gradient with respect to `own`, of its shape.
    """
    terms = mutual_parts(own, other, y)
    loss = terms.cross_entropy * trust + terms.divergence * (1 - trust)
    from_labels = (terms.own_softmax - one_hot(y, own.shape[-1])) * trust
    from_other = (terms.own_softmax - terms.other_softmax) * (1 - trust)
    slope = from_labels + from_other
    weights = label_weights(y)
    return loss, slope / own.shape[0] if weights is None else slope * weights[..., None]


def _by_pytorch(
    own: Tensor,
    other: Tensor,
    y: Tensor,
    trust: float,
) -> Tensor:
    """Compute the same loss with PyTorch's own losses, as the reference."""
    divergence = nn.functional.kl_div(
        torch.log_softmax(own, -1),
        torch.log_softmax(other, -1),
        reduction="none",
        log_target=True,
    ).sum(-1)
    return trust * torch_cross_entropy(own, y) + (1 - trust) * divergence[y >= 0].mean()


MUTUAL = PairRoutine(
    name="mutual",
    knobs=(Knob("alpha", checked_with=0.3), Knob("beta", checked_with=0.8)),
    value_and_slope=mutual_loss_and_logit_gradient,
    pytorch=_by_pytorch,
)
"""The routine of FML; its two knobs set how much each model trusts the labels."""

PAIR_ROUTINES: Mapping[str, PairRoutine] = MappingProxyType({MUTUAL.name: MUTUAL})
