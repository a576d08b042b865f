"""The rule ``whalefl``: a device takes the width that its utility determines.

Huai-an Su, Jiaxiang Geng, Liang Li, Xiaoqi Qin, Yanzhao Hou, Hao Wang, Xin Fu, Miao Pan: "WHALE-FL:
Wireless and Heterogeneity Aware Latency Efficient Federated Learning over Mobile Devices via
Adaptive Subnetwork Scheduling", 2024, https://arxiv.org/abs/2405.00885. Specification 4.2. The
formulas are in `device_runtime.training.choosers.adaptive`; this module supplies the measurements:

- T_cm, the time in which the board would send a model, of the size that the server names
  (specification 4.2, step 2).
- T_cp, the time of a round's steps at the NARROWEST tier.

Both are measured in the round of the choice, before it. If one is unknown, the narrowest tier is
chosen.
"""

from collections.abc import Sequence

from pydantic import Field

from device_runtime.training.choosers.adaptive import (
    Choice,
    Progress,
    choose,
    fit,
    level,
    observe,
)
from device_runtime.training.choosers.rule import (
    Decision,
    Rule,
    Situation,
    cost_of,
    trained_share_of,
    width_of,
)
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.sizing import Sizing


class Memory(FrozenModel):
    """The memory, which must survive a restart."""

    round: int = Field(default=0, ge=0)  # the last round whose loss is included
    progress: Progress  # training efficiency and last loss


def _fresh(sizing: Sizing) -> Memory:
    return Memory(progress=Progress(training_efficiency=sizing.constants.neutral))


def _choose(sizing: Sizing, memory: Memory | None, situation: Situation) -> Decision:
    progress = (memory or _fresh(sizing)).progress
    constants = sizing.constants
    smallest = min(situation.tiers, key=cost_of)
    transmit = 1.0
    compute = 1.0
    if constants.arm != "training":  # this arm holds the system efficiency fixed
        if not situation.step_seconds or not situation.bytes_per_second:
            return Decision(smallest)
        transmit = sizing.transmitted_bytes / situation.bytes_per_second
        compute = situation.step_seconds * situation.steps
    choice = choose(
        progress,
        constants,
        transmit_seconds=transmit,
        compute_seconds=compute,
        maximum=max(map(width_of, situation.tiers)),
    )
    efficiency = None if constants.arm == "training" else choice.system_efficiency
    return Decision(_tier_of(choice, situation.tiers), efficiency)


def _tier_of(choice: Choice, offered: Sequence[str]) -> str:
    """Return the offered tier of a utility: by its width or, among trained shares, by its cost.

    The paper has widths only. With shares a width says little of a step, so the levels of the
    utility are as many as the tiers, in the order of the operations of a step.
    """
    if any(trained_share_of(tier) < 1 for tier in offered):
        by_cost = sorted(offered, key=lambda tier: (cost_of(tier), tier))
        return by_cost[level(choice.normalised, len(by_cost))]
    # If widths are equal, the first one offered.
    tiers = {width_of(tier): tier for tier in reversed(offered)}
    return tiers[fit(choice.width, tuple(tiers))]


def _learn(
    sizing: Sizing,
    memory: Memory | None,
    number: int,
    loss: float,
) -> Memory:
    before = memory or _fresh(sizing)
    if number <= before.round:
        return before
    return Memory(round=number, progress=observe(before.progress, sizing.constants, loss))


RULE = Rule(
    name="whalefl",
    settings=Sizing,
    memory=Memory,
    choose=_choose,
    learn=_learn,
)
