"""HeteroFL: narrower copies of one model, averaged entry by entry over the devices that hold the
entry.

Enmao Diao, Jie Ding, Vahid Tarokh: "HeteroFL: Computation and Communication Efficient Federated
Learning for Heterogeneous Clients", ICLR 2021, https://arxiv.org/abs/2010.01264. Specification
sections 1.2 and 1.3.

Updates count alike whatever their number of samples, and rows of the output layer are taken only
from devices that hold the row's label. With ``plan = "rolling"`` the same average is FedRolex's
(specification 2.3), with ``random`` Federated Dropout's, for which every device draws its own
units.
"""

import hashlib
from functools import partial
from typing import Any

from broker_server.strategies.accumulator import Accumulator, finish, fold, start
from broker_server.strategies.holders import robust_merge
from broker_server.strategies.strategy import (
    Basis,
    Contribution,
    Merge,
    Method,
    PlannedTier,
    PlanRequest,
    Strategy,
    average_and_step,
)
from fleet_protocol.frozen import FrozenModel
from models.draws import PlanKind, Window
from models.layout import Layout
from models.plan import make_plan


def plan_tier(
    layout: Layout,
    request: PlanRequest,
    window: Window | PlanKind = "static",
    *,
    own: bool = False,
) -> PlannedTier:
    """One device's plan: all of a tier share it, but for random ones and where each device has its
    `own` weights.
    """
    rule = window if isinstance(window, Window) else Window(window)
    own |= rule.kind == "random"
    # A seed of the device's own, so that no two devices draw the same random plan.
    mixed = f"{request.seed}/{request.device}".encode()
    seed = int.from_bytes(hashlib.sha256(mixed).digest()[:7], "big") if own else request.seed
    make = partial(make_plan, layout, request.tier, rule, round_index=request.version, seed=seed)
    return PlannedTier(f"{request.tier.id}/{request.device}" if own else request.tier.id, make)


def build(basis: Basis[FrozenModel | None]) -> Strategy:
    """The strategy as configured; ``weighting`` defaults to uniform, ``label_rule`` to on."""
    by_samples = (basis.weighting or "uniform") == "samples"
    label_rule = basis.label_rule is not False

    def add(sums: Accumulator, update: Contribution) -> None:
        fold(
            sums,
            update.key,
            update.plan,
            update.weights,
            weight=float(update.metrics.examples) if by_samples else 1.0,
            labels=update.metrics.labels if label_rule else None,
        )

    merge: Merge[Any] = Merge(
        lambda: start(basis.layout), add, average_and_step(finish, basis.optimizer), deltas=True
    )
    if basis.average != "mean":
        merge = robust_merge(basis.average, basis.faulty, basis.optimizer, label_rule=label_rule)
    return Strategy(
        name="heterofl",
        paper="https://arxiv.org/abs/2010.01264",
        tiers=tuple(basis.tiers),
        plan=lambda request: plan_tier(basis.layout, request, basis.plan),
        merge=merge,
    )


STRATEGIES = {"heterofl": Method(build)}
