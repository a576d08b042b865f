"""The proximal term of FedProx, which keeps a device's weights close to the sent ones.

Tian Li, Anit Kumar Sahu, Manzil Zaheer, Maziar Sanjabi, Ameet Talwalkar, Virginia Smith: "Federated
Optimization in Heterogeneous Networks", MLSys 2020, https://arxiv.org/abs/1812.06127, equation 2:
the local loss gains ``mu / 2 * ||w - w_sent||^2``. As a part of the loss, its gradient is added
before clipping and weight decay.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def proximal_loss(
    parameters: Sequence[Tensor],
    anchors: Sequence[Tensor],
    mu: Tensor | float,
) -> Tensor:
    """Return ``mu / 2`` times the squared distance of parameters from their anchors, float []."""
    squares = []
    for parameter, anchor in zip(parameters, anchors, strict=True):
        squares.append(torch.square(parameter - anchor).sum())
    return torch.stack(squares).sum() * (mu / 2)


def proximal_gradients(
    gradients: Sequence[Tensor],
    parameters: Sequence[Tensor],
    anchors: Sequence[Tensor],
    mu: Tensor | float,
) -> list[Tensor]:
    """Return the gradients of the loss with those of the proximal term, ``mu * (w - w_sent)``."""
    pulled = []
    for gradient, parameter, anchor in zip(gradients, parameters, anchors, strict=True):
        pulled.append(gradient + (parameter - anchor) * mu)
    return pulled
