"""Worked examples of HeteroFL on what a device computes: masked loss, Scaler, static batch norm (H6
to H8).
"""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from broker_server.rounds.norm_statistics import combine_statistics
from fleet_protocol.manifest import statistic_mean, statistic_variance
from models.zoo.layers import Scaler, StaticBatchNorm, set_mode
from tests.conformance.entry import Check, Entry
from trainer_export.losses.cross_entropy import correct_count, loss_and_logit_gradient

__all__ = ["HANDLERS"]

_NORM = "norm"


def _logits(values: Any) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def _mask(present: Any, classes: int) -> Tensor:
    mask = torch.zeros(classes, dtype=torch.float64)
    mask[list(present)] = 1
    return mask


def _log_probabilities(logits: Tensor, mask: Tensor) -> Tensor:
    """What the training loss makes of every label: it is minus the logarithm of the label's
    probability.
    """
    losses = [
        loss_and_logit_gradient(logits, torch.tensor([label]), mask)[0]
        for label in range(logits.shape[1])
    ]
    return -torch.stack(losses)


def _masked_logits(logits: Tensor, mask: Tensor) -> Tensor:
    """The logits behind these probabilities, which a constant shift does not change: an absent
    label stands at 0.
    """
    logs = _log_probabilities(logits, mask)
    absent = (mask == 0).nonzero().flatten()
    anchor = logs[absent[0]] if len(absent) else logs[0] - logits[0, 0]
    return logs - anchor


def h6(entry: Entry, check: Check) -> None:
    """The loss and its gradient when logits of absent labels are zeroed."""
    expected = entry.expected
    logits = _logits(entry.inputs["logits"])
    mask = _mask(entry.inputs["present"], logits.shape[1])
    target = torch.tensor([entry.inputs["target"]])
    loss, gradient = loss_and_logit_gradient(logits, target, mask)
    check.same("masked_logits", _masked_logits(logits, mask).tolist(), expected["masked_logits"])
    check.same("probs", _log_probabilities(logits, mask).exp().tolist(), expected["probs"])
    check.same("loss", loss.item(), expected["loss"])
    check.same("grad_logits", gradient[0].tolist(), expected["grad_logits"])
    plain, _ = loss_and_logit_gradient(logits, target, torch.ones_like(mask))
    check.same("loss_unmasked", plain.item(), expected["loss_unmasked"])


def h6b(entry: Entry, check: Check) -> None:
    """The predicted label when logits of absent labels are zeroed: it may be an absent one."""
    logits = _logits(entry.inputs["logits"])
    mask = _mask(entry.inputs["present"], logits.shape[1])
    check.same("masked", _masked_logits(logits, mask).tolist(), entry.expected["masked"])
    hits = [
        int(correct_count(logits, torch.tensor([label]), mask)) for label in range(logits.shape[1])
    ]
    check.same("argmax", hits.index(1), entry.expected["argmax"])


def h7(entry: Entry, check: Check) -> None:
    """The Scaler, and how little of it a norm behind it lets through."""
    x = torch.tensor(entry.inputs["x"], dtype=torch.float64)[:, None]
    scaler = Scaler(entry.inputs["s"])
    norm = set_mode(StaticBatchNorm(1, entry.inputs["eps"]).double(), "train")
    scaled = set_mode(scaler, "train")(x)
    check.same("train", scaled[:, 0].tolist(), entry.expected["train"])
    check.same("eval", set_mode(scaler, "eval")(x)[:, 0].tolist(), entry.expected["eval"])
    check.same("bn_of_x", norm(x)[:, 0].tolist(), entry.expected["bn_of_x"])
    check.same("bn_of_scaled", norm(scaled)[:, 0].tolist(), entry.expected["bn_of_scaled"])


def _batch_statistics(batch: Sequence[float]) -> dict[str, NDArray[np.float64]]:
    norm = set_mode(StaticBatchNorm(1).double(), "statistics")
    norm(torch.tensor(batch, dtype=torch.float64)[:, None])
    if norm.last_mean is None or norm.last_var is None:
        raise TypeError("the norm kept no statistics")
    return {
        statistic_mean(_NORM): norm.last_mean.numpy(),
        statistic_variance(_NORM): norm.last_var.numpy(),
    }


def h8(entry: Entry, check: Check) -> None:
    """Statistics of a static batch norm, batch after batch: every batch weighs the same, whatever
    its size.
    """
    batches = entry.inputs["batches"]
    expected = entry.expected
    answers = [(1, _batch_statistics(batch)) for batch in batches]

    def running(count: int) -> list[float]:
        combined = combine_statistics(answers[:count], [_NORM], "per_client")
        return [
            float(combined[name][0]) for name in (statistic_mean(_NORM), statistic_variance(_NORM))
        ]

    trace = [running(count) for count in range(1, len(batches) + 1)]
    check.same("trace", trace, expected["trace"], relative=1e-6)
    check.same("running_mean", trace[-1][0], expected["running_mean"], relative=1e-6)
    check.same("running_var", trace[-1][1], expected["running_var"], relative=1e-6)
    whole = _batch_statistics([value for batch in batches for value in batch])
    check.same("pooled_mean", float(whole[statistic_mean(_NORM)][0]), expected["pooled_mean"])
    check.same(
        "pooled_var_unbiased",
        float(whole[statistic_variance(_NORM)][0]),
        expected["pooled_var_unbiased"],
    )


HANDLERS = MappingProxyType({"H6": h6, "H6b": h6b, "H7": h7, "H8": h8})
"""What computes an entry, by the prefix of its id."""
