"""HeteroFL: averages narrower copies of one model over the devices that hold each entry.

Enmao Diao, Jie Ding, Vahid Tarokh: "HeteroFL: Computation and Communication Efficient Federated
Learning for Heterogeneous Clients", ICLR 2021, https://arxiv.org/abs/2010.01264. Specification
sections 1.2 and 1.3.

Updates count alike whatever their number of samples, and rows of the output layer are merged only
from devices that hold the row's label. With ``plan = "rolling"`` the same average is FedRolex's
(specification 2.3), with ``random`` Federated Dropout's, for which every device draws its own
units.
"""

import hashlib
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from broker_server.strategies.accumulator import selective_average
from broker_server.strategies.robust_merge import robust_merge
from broker_server.strategies.strategy import (
    Basis,
    Merge,
    Method,
    PlannedTier,
    PlanRequest,
    Strategy,
)
from broker_server.strategies.traits import Trait
from fleet_protocol.frozen import FrozenModel
from models.draws import PlanKind, Window
from models.layout import Layout
from models.plan import make_plan

PLAN_BREAKS: Mapping[PlanKind, frozenset[Trait]] = MappingProxyType(
    {
        "static": frozenset(),
        "rolling": frozenset({Trait.FIXED_PLANS}),
        "random": frozenset({Trait.FIXED_PLANS, Trait.SHARED_PLANS}),
    }
)
"""Traits that each way to choose units breaks: a random plan belongs to one device in one round."""


def plan_tier(
    layout: Layout,
    request: PlanRequest,
    window: Window | PlanKind = "static",
    *,
    per_device: bool = False,
    tier_draws: bool = False,
) -> PlannedTier:
    """Plan one device's sub-model.

    Args:
        layout: the global model.
        request: the device, its tier and the round.
        window: which units a narrower sub-model keeps.
        per_device: give the plan only to this device, which has separate weights. Random plans
            belong to one device unless `tier_draws`; all devices of a tier share the others.
        tier_draws: let all devices of a tier share a random plan, too.
    """
    rule = window if isinstance(window, Window) else Window(window)
    tier = request.tier
    is_random = rule.kind == "random" and not tier_draws
    is_shared = not is_random and not per_device
    seed = request.seed
    key = tier.id
    if not is_shared:
        # A separate seed for the device, so that no two devices draw the same random plan.
        device_words = f"{request.seed}/{request.device}".encode()
        seed = int.from_bytes(hashlib.sha256(device_words).digest()[:7], "big")
        key = f"{tier.id}/{request.device}"
    make = partial(
        make_plan,
        layout,
        tier,
        rule,
        round_index=request.version,
        seed=seed,
    )
    return PlannedTier(key, make)


def build(basis: Basis[FrozenModel | None]) -> Strategy:
    """Build the strategy from its settings.

    ``weighting`` defaults to uniform, ``label_rule`` to on.
    """
    label_rule = basis.label_rule is not False
    if basis.average == "mean":
        merge: Merge[Any] = selective_average(
            basis.layout,
            basis.optimizer,
            # Uniform by default, as in the released code.
            by_samples=basis.weighting == "samples",
            label_rule=label_rule,
        )
    else:
        merge = robust_merge(
            basis.average,
            basis.faulty,
            basis.optimizer,
            label_rule=label_rule,
        )
    return Strategy(
        name="heterofl",
        paper="https://arxiv.org/abs/2010.01264",
        tiers=tuple(basis.tiers),
        plan=lambda request: plan_tier(basis.layout, request, basis.plan),
        merge=merge,
        breaks=PLAN_BREAKS[basis.plan],
    )


STRATEGIES = {"heterofl": Method(build)}
