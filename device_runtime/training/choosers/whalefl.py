"""The rule ``whalefl``: a device takes the width that its utility asks for, and measures its times as it goes.

Huai-an Su, Jiaxiang Geng, Liang Li, Xiaoqi Qin, Yanzhao Hou, Hao Wang, Xin Fu, Miao Pan: "WHALE-FL: Wireless and
Heterogeneity Aware Latency Efficient Federated Learning over Mobile Devices via Adaptive Subnetwork Scheduling", 2024,
https://arxiv.org/abs/2405.00885. Specification 4.2. The formulas are `device_runtime.training.choosers.adaptive`; here
are the measurements that they need:

- T_cm, the time of the WHOLE model on the link (specification 4.2, step 2): its size by the speed of the last download.
- T_cp, the time of a round's steps at the NARROWEST tier. It was timed when the board first trained that tier; since
  then it is scaled by how much slower or faster the board's last round was than the first one of the same tier.

Where one of them is not known yet, the narrowest tier is taken, which measures both.
"""

from collections.abc import Mapping

from pydantic import Field

from device_runtime.training.choosers.adaptive import Progress, choose, fit, observe
from device_runtime.training.choosers.rule import Experience, Rule, Situation, width_of
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.sizing import Sizing


class Memory(FrozenModel):
    """What must survive a restart."""

    round: int = Field(default=0, ge=0)  # the last one whose loss is in it
    progress: Progress  # training efficiency and last loss
    # time of a training step at each tier, at the speed of the board when `drift` is 1
    step_seconds: Mapping[str, float] = Field(default_factory=dict)
    drift: float = Field(default=1.0, gt=0)  # how many times slower the board was in its last round


def _fresh(sizing: Sizing) -> Memory:
    return Memory(progress=Progress(training_efficiency=sizing.constants.neutral))


def _choose(sizing: Sizing, memory: Memory | None, situation: Situation) -> str:
    known, constants = memory or _fresh(sizing), sizing.constants
    tiers = {width_of(tier): tier for tier in reversed(situation.tiers)}  # of equal widths the first one offered
    narrowest, widest = min(tiers), max(tiers)
    transmit = compute = 1.0
    if constants.arm != "training":  # that arm holds the system efficiency fixed
        single = {**known.step_seconds, **situation.step_seconds}.get(tiers[narrowest])
        if not single or not situation.bytes_per_second:
            return tiers[narrowest]
        transmit, compute = sizing.full_bytes / situation.bytes_per_second, single * known.drift * situation.steps
    choice = choose(known.progress, constants, transmit_seconds=transmit, compute_seconds=compute, maximum=widest)
    return tiers[fit(choice.width, tuple(tiers))]


def _learn(sizing: Sizing, memory: Memory | None, experience: Experience) -> Memory:
    before = memory or _fresh(sizing)
    if experience.round <= before.round:
        return before
    known, drift = dict(before.step_seconds), before.drift
    if experience.step_seconds:
        if experience.tier in known:
            drift = experience.step_seconds / known[experience.tier]
        else:
            known[experience.tier] = experience.step_seconds / drift
    return Memory(
        round=experience.round,
        progress=observe(before.progress, sizing.constants, experience.loss),
        step_seconds=known,
        drift=drift,
    )


RULE = Rule(name="whalefl", settings=Sizing, memory=Memory, choose=_choose, learn=_learn)
