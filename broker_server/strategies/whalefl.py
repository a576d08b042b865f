"""WHALE-FL: each device picks its own width every round.

The server offers the widths and honours the choice.

Huai-an Su, Jiaxiang Geng, Liang Li, Xiaoqi Qin, Yanzhao Hou, Hao Wang, Xin Fu, Miao Pan: "WHALE-FL:
Wireless and Heterogeneity Aware Latency Efficient Federated Learning over Mobile Devices via
Adaptive Subnetwork Scheduling", 2024, https://arxiv.org/abs/2405.00885. Specification section 4,
whose equations 3 to 8 are reconstructed.

The device's half, the utilities, is `device_runtime.training.choosers.adaptive`. It is offered
every tier within its maximum, which is the cap of equation 7, and the server takes an update of any
of them. Slices and the merge are HeteroFL's, the label rule included. What the method improves is
the time of a round, which is that of its slowest device.
"""

from collections.abc import Sequence
from dataclasses import replace

from broker_server.strategies import heterofl
from broker_server.strategies.strategy import Basis, Method, Strategy
from fleet_protocol.errors import PlanError
from fleet_protocol.messages import Chooser
from fleet_protocol.sizing import Sizing, SizingConstants
from models.tier import Tier

_FLOAT_BYTES = 4


def build(basis: Basis[SizingConstants]) -> Strategy:
    """The strategy as configured: constants that devices choose with, and the rest as for HeteroFL.

    Raises:
        PlanError: plans other than leading units are configured.
    """
    if basis.plan != "static":
        raise PlanError(
            f"whalefl cuts leading units, as HeteroFL does; remove plan = {basis.plan!r}"
        )
    sizing = Sizing(
        constants=basis.options,
        full_bytes=_FLOAT_BYTES * basis.layout.parameter_count(basis.layout.tier(1.0)),
    )
    chooser = Chooser(rule="whalefl", settings=sizing.model_dump(mode="json"))
    return replace(
        heterofl.build(basis),
        name="whalefl",
        paper="https://arxiv.org/abs/2405.00885",
        offer=lambda largest: tiers_within(basis.tiers, largest),
        instruct=lambda instructions, _closed: instructions.model_copy(update={"chooser": chooser}),
    )


def tiers_within(allowed: Sequence[Tier], maximum: Tier) -> tuple[Tier, ...]:
    """The allowed tiers of the maximum's depth that are no wider than it, widest first.

    A PlanError if there is none.

    A device that does not size itself takes the first, which is HeteroFL's fixed assignment.
    """
    fitting = sorted(
        (
            tier
            for tier in set(allowed)
            if tier.depth == maximum.depth and tier.width <= maximum.width
        ),
        reverse=True,
    )
    if not fitting:
        raise PlanError(
            f"no tier in use fits a device whose largest is {maximum.id}; there are"
            f" {', '.join(tier.id for tier in sorted(set(allowed))) or 'none'}"
        )
    return tuple(fitting)


STRATEGIES = {"whalefl": Method(build, SizingConstants)}
