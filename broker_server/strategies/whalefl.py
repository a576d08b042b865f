"""WHALE-FL: offer each device several widths, of which it picks one in every round.

Huai-an Su, Jiaxiang Geng, Liang Li, Xiaoqi Qin, Yanzhao Hou, Hao Wang, Xin Fu, Miao Pan: "WHALE-FL:
Wireless and Heterogeneity Aware Latency Efficient Federated Learning over Mobile Devices via
Adaptive Subnetwork Scheduling", 2024, https://arxiv.org/abs/2405.00885. Specification section 4,
whose equations 3 to 8 are reconstructed.

The device's half, the utilities, is `device_runtime.training.choosers.adaptive`. A device is
offered every tier within its maximum, which is the cap of equation 7, and the server takes an
update of any of them. Slices and the merge are HeteroFL's, the label rule included. The method
improves the time of a round, which is that of its slowest device.
"""

from collections.abc import Sequence
from dataclasses import replace

from broker_server.strategies import heterofl
from broker_server.strategies.strategy import Basis, Method, Strategy
from fleet_protocol.errors import PlanError
from fleet_protocol.messages import Chooser, Instructions
from fleet_protocol.sizing import Sizing, SizingConstants
from models.tier import Tier

_FLOAT_BYTES = 4


def build(basis: Basis[SizingConstants]) -> Strategy:
    """Build HeteroFL with the constants that devices choose their widths with.

    Raises:
        PlanError: plans other than leading units are configured.
    """
    if basis.plan != "static":
        raise PlanError(
            f"whalefl cuts leading units, as HeteroFL does; remove plan = {basis.plan!r}"
        )
    full_values = basis.layout.parameter_count(basis.layout.tier(1.0))
    sizing = Sizing(constants=basis.options, full_bytes=_FLOAT_BYTES * full_values)
    chooser = Chooser(rule="whalefl", settings=sizing.model_dump(mode="json"))

    def instruct(instructions: Instructions, _closed_rounds: int) -> Instructions:
        return instructions.model_copy(update={"chooser": chooser})

    return replace(
        heterofl.build(basis),
        name="whalefl",
        paper="https://arxiv.org/abs/2405.00885",
        offer=lambda largest: tiers_within(basis.tiers, largest),
        instruct=instruct,
    )


def tiers_within(allowed: Sequence[Tier], maximum: Tier) -> tuple[Tier, ...]:
    """Return the allowed tiers of the maximum's depth that are no wider than it, widest first.

    A device that does not choose takes the first, which is HeteroFL's fixed assignment.

    Raises:
        PlanError: there is no such tier.
    """
    within = []
    for tier in sorted(set(allowed), reverse=True):
        # Another depth is another model, whatever its width.
        if tier.depth != maximum.depth or tier.width > maximum.width:
            continue
        within.append(tier)
    if not within:
        known = ", ".join(tier.id for tier in sorted(set(allowed)))
        raise PlanError(
            f"no tier in use fits a device whose largest is {maximum.id}; there are"
            f" {known or 'none'}"
        )
    return tuple(within)


STRATEGIES = {"whalefl": Method(build, SizingConstants)}
