"""Worked examples of FML: the mutual losses, their limits, and a round of two devices (F1 to
F3).
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from broker_server.strategies import accumulator as merge
from models import Axis, AxisKind, Dim, compile_plan, make_plan
from tests.broker_server.methods import merge_memes
from tests.conformance.entry import Check, Entry, NotApplicableError
from tests.conformance.small import float32, layout_of
from trainer_export.optimizers.sgd import Sgd
from trainer_export.pair_step import Learner, LearnerResult, pair_step
from trainer_export.recipe import Recipe
from trainer_export.routines.mutual import MUTUAL, mutual_loss_and_logit_gradient, mutual_parts
from trainer_export.update import TrainedTensors

__all__ = ["HANDLERS"]

_PLAIN_SGD = Recipe(Sgd(momentum=0.0, weight_decay=0.0), clip_norm=None)


def _tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def f1(entry: Entry, check: Check) -> None:
    """Both losses, their parts and their gradients."""
    given = entry.inputs
    expected = entry.expected
    personal = _tensor(given["logits_personal"])
    meme = _tensor(given["logits_meme"])
    y = torch.tensor(given["labels"])
    for name, other, own_logits, other_logits, trust in (
        ("personal", "meme", personal, meme, given["alpha"]),
        ("meme", "personal", meme, personal, given["beta"]),
    ):
        parts = mutual_parts(own_logits, other_logits, y)
        loss, gradient = mutual_loss_and_logit_gradient(own_logits, other_logits, y, trust)
        check.same(f"p_{name}", parts.own_softmax.tolist(), expected[f"p_{name}"])
        check.same(f"ce_{name}", parts.cross_entropy.item(), expected[f"ce_{name}"])
        check.same(
            f"kl_{other}_to_{name}", parts.divergence.item(), expected[f"kl_{other}_to_{name}"]
        )
        check.same(f"loss_{name}", loss.item(), expected[f"loss_{name}"])
        check.same(f"grad_{name}", gradient.tolist(), expected[f"grad_{name}"])


def f2(entry: Entry, check: Check) -> None:
    """Gradients when a model trusts the labels alone, or the other model alone."""
    given = entry.inputs
    if "same" in given:
        if given["same"] not in entry.others:
            raise NotApplicableError(
                f"it takes its inputs from {given['same']}, which is not in the file"
            )
        given = entry.others[given["same"]].inputs
    y = torch.tensor(given["labels"])
    logits = {"personal": _tensor(given["logits_personal"]), "meme": _tensor(given["logits_meme"])}
    for key, expected in entry.expected.items():
        _, name, trust = key.split("_")
        other = "meme" if name == "personal" else "personal"
        share = float(trust.removeprefix("alpha").removeprefix("beta"))
        _, gradient = mutual_loss_and_logit_gradient(logits[name], logits[other], y, share)
        check.same(key, gradient.tolist(), expected)


def _linear(parameters: Sequence[Tensor], x: Tensor) -> Tensor:
    return x @ parameters[0].T


def _local_step(given: Mapping[str, Any], number: int) -> tuple[LearnerResult, LearnerResult]:
    lr = _tensor(given["lr"])
    personal, meme = (
        Learner(_linear, TrainedTensors([_tensor(weights)], {}), trust, lr, _PLAIN_SGD)
        for weights, trust in (
            (given["personal"][number], given["alpha"]),
            (given["global_"], given["beta"]),
        )
    )
    batch = given["data"][number]
    return pair_step(MUTUAL, (personal, meme), _tensor(batch["X"]), torch.tensor(batch["y"]))


def f3(entry: Entry, check: Check) -> None:
    """One round: a simultaneous step on each device, then the plain mean of the memes."""
    given = entry.inputs
    expected = entry.expected["simultaneous"]
    learnt = [_local_step(given, number) for number in range(len(given["data"]))]
    check.same(
        "personal",
        [personal.trained.parameters[0].tolist() for personal, _ in learnt],
        expected["personal"],
    )
    check.same(
        "meme", [meme.trained.parameters[0].tolist() for _, meme in learnt], expected["meme"]
    )
    rows, columns = float32(given["global_"]).shape
    layout = layout_of(
        [Axis("rows", rows, AxisKind.FIXED), Axis("columns", columns, AxisKind.FIXED)],
        {"W": (Dim("rows"), Dim("columns"))},
    )
    old = {"W": float32(given["global_"])}
    memes = [{"W": float32(meme.trained.parameters[0].tolist())} for _, meme in learnt]
    check.same(
        "global_new", merge_memes(layout, old, memes)["W"], expected["global_new"], relative=1e-6
    )
    # For recognition: the same merge with FedAvg's weights by samples.
    state = merge.start(layout)
    plan = compile_plan(layout, make_plan(layout, layout.tier(1.0)))
    for meme, batch in zip(memes, given["data"], strict=True):
        merge.fold(state, "meme", plan, meme, weight=float(len(batch["y"])))
    weighted = merge.finish(state, old)["W"]
    check.same(
        "global_if_sample_weighted", weighted, expected["global_if_sample_weighted"], relative=1e-6
    )
    if "sequential" in entry.expected:
        check.note("the sequential rows are for recognition: the step is simultaneous")


HANDLERS = MappingProxyType({"F1": f1, "F2": f2, "F3": f3})
"""What computes an entry, by the prefix of its id."""
