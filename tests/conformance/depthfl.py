"""Worked examples of DepthFL: the loss of several exits and its gradients (D1)."""

from types import MappingProxyType

import torch

from tests.conformance.entry import Check, Entry
from trainer_export.loss import Answer
from trainer_export.losses.all_exits_teach import AllExitsTeach
from trainer_export.losses.exits import CROSS_ENTROPY

__all__ = ["HANDLERS"]


def d1(entry: Entry, check: Check) -> None:
    """Cross entropies, loss and gradients of all exits."""
    given = entry.inputs
    output = [torch.tensor(logits, dtype=torch.float64) for logits in given["logits"]]
    y = torch.tensor(given["labels"])
    numbers = {"distillation": given["distillation"], "inner": given["inner"]}
    mask = torch.ones(output[0].shape[-1], dtype=torch.float64)
    answer = Answer(y, mask, knobs=numbers)
    entropies = [CROSS_ENTROPY.value(logits, answer).item() for logits in output]
    loss, slopes = AllExitsTeach(temperature=given["temperature"]).value_and_slope(output, answer)
    check.same("ce", entropies, entry.expected["ce"])
    check.same("loss", loss.item(), entry.expected["loss"])
    check.same("grad", [slope.tolist() for slope in slopes], entry.expected["grad"])


HANDLERS = MappingProxyType({"D1": d1})
"""What computes an entry, by the prefix of its id."""
