"""The rule ``whalefl``: a device takes the width that its utility asks for.

Huai-an Su, Jiaxiang Geng, Liang Li, Xiaoqi Qin, Yanzhao Hou, Hao Wang, Xin Fu, Miao Pan: "WHALE-FL:
Wireless and Heterogeneity Aware Latency Efficient Federated Learning over Mobile Devices via
Adaptive Subnetwork Scheduling", 2024, https://arxiv.org/abs/2405.00885. Specification 4.2. The
formulas are `device_runtime.training.choosers.adaptive`; here are the measurements that they need:

- T_cm, the time of the WHOLE model on the link (specification 4.2, step 2): its size by the speed
  of a download.
- T_cp, the time of a round's steps at the NARROWEST tier.

Both are of the round that the choice is for, and measured before it. Where one is not known, the
narrowest is taken.
"""

from pydantic import Field

from device_runtime.training.choosers.adaptive import Progress, choose, fit, observe
from device_runtime.training.choosers.rule import Rule, Situation, width_of
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.sizing import Sizing


class Memory(FrozenModel):
    """What must survive a restart."""

    round: int = Field(default=0, ge=0)  # the last one whose loss is in it
    progress: Progress  # training efficiency and last loss


def _fresh(sizing: Sizing) -> Memory:
    return Memory(progress=Progress(training_efficiency=sizing.constants.neutral))


def _choose(sizing: Sizing, memory: Memory | None, situation: Situation) -> str:
    progress = (memory or _fresh(sizing)).progress
    constants = sizing.constants
    # Of equal widths the first one offered.
    tiers = {width_of(tier): tier for tier in reversed(situation.tiers)}
    narrowest = min(tiers)
    widest = max(tiers)
    transmit = 1.0
    compute = 1.0
    if constants.arm != "training":  # that arm holds the system efficiency fixed
        if not situation.step_seconds or not situation.bytes_per_second:
            return tiers[narrowest]
        transmit = sizing.full_bytes / situation.bytes_per_second
        compute = situation.step_seconds * situation.steps
    choice = choose(
        progress,
        constants,
        transmit_seconds=transmit,
        compute_seconds=compute,
        maximum=widest,
    )
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
