"""Schedules of the learning rate are PyTorch's, round by round, and step by step on a device."""

from itertools import pairwise

import pytest
import torch

from fleet_protocol.messages import TrainSettings
from fleet_protocol.messages.instructions import Ramp
from fleet_protocol.schedule import RateSchedule

ROUNDS = 12


def pytorchs(make):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = make(optimizer)
    found = []
    for _ in range(ROUNDS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"kind": "cosine"}, lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, ROUNDS)),
        (
            {"kind": "cosine", "final": 0.2},
            lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, ROUNDS, 0.2),
        ),
        (
            {"kind": "linear", "final": 0.1},
            lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.1, ROUNDS),
        ),
        (
            {"kind": "step", "every": 4, "factor": 0.5},
            lambda o: torch.optim.lr_scheduler.StepLR(o, 4, 0.5),
        ),
        (
            {"warmup": 4},
            lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: min(1.0, (n + 1) / 4)),
        ),
    ],
)
def test_rounds_are_as_in_pytorch(ours, theirs):
    """The multiplier of each round."""
    schedule = RateSchedule.model_validate(ours)
    assert [schedule.multiplier(n, ROUNDS) for n in range(ROUNDS)] == pytest.approx(
        pytorchs(theirs)
    )


def test_steps_go_on_from_round_to_round():
    """Six steps of two rounds are the steps of one schedule, on devices with any number of them."""
    schedule = RateSchedule(kind="cosine", warmup=0.5, per="step")
    rates = []
    for closed in range(2):
        ramp = Ramp(schedule=schedule, position=closed, rounds=2)
        train = TrainSettings(learning_rate=0.1, epochs=1, batch_size=1, seed=1, ramp=ramp)
        rates += [train.rate_at(step, 6) for step in range(6)]
    assert rates == pytest.approx([0.1 * schedule.multiplier(n / 6, 2, 1 / 6) for n in range(12)])
    assert rates[:3] == pytest.approx([0.1 / 3, 0.2 / 3, 0.1])
    assert all(a > b for a, b in pairwise(rates[3:]))
