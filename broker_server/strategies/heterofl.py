"""HeteroFL: narrower copies of one model, averaged entry by entry over the devices that hold the entry.

Enmao Diao, Jie Ding, Vahid Tarokh: "HeteroFL: Computation and Communication Efficient Federated Learning for
Heterogeneous Clients", ICLR 2021, https://arxiv.org/abs/2010.01264. METHODS sections 1.2 and 1.3.

Updates count alike whatever their number of samples, and rows of the output layer are taken only from devices that
hold the row's label. With ``plan = "rolling"`` the same average is FedRolex's (METHODS 2.3), with ``random`` Federated
Dropout's, for which every device draws its own units.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from broker_server.config import StrategyConfig
from broker_server.merge import Accumulator, finish, fold, start
from broker_server.strategies.strategy import Contribution, PlannedTier, PlanRequest, Strategy
from models.layout import Layout
from models.plan import make_plan
from models.tier import Tier

__all__ = ["build", "seed_of"]


def seed_of(seed: int, device: str) -> int:
    """A seed of the device's own, so that no two devices draw the same random plan."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{device}".encode()).digest()[:7], "big")


def build(config: StrategyConfig) -> Strategy:
    """The strategy as configured.

    Args:
        config: plan kind; ``weighting`` defaults to uniform, ``label_rule`` to on.
    """
    by_samples = (config.weighting or "uniform") == "samples"
    label_rule = config.label_rule is not False

    def every_tier(_layout: Layout, tiers: Sequence[Tier]) -> tuple[Tier, ...]:
        return tuple(tiers)

    def plan(request: PlanRequest) -> PlannedTier:
        own = config.plan == "random"
        made = make_plan(
            request.layout,
            request.tier,
            config.plan,
            round_index=request.version,
            seed=seed_of(request.seed, request.device) if own else request.seed,
        )
        return PlannedTier(f"{request.tier.id}/{request.device}" if own else request.tier.id, made)

    def add(state: Accumulator, update: Contribution) -> None:
        fold(
            state,
            update.key,
            update.plan,
            update.weights,
            weight=float(update.metrics.examples) if by_samples else 1.0,
            labels=update.metrics.labels if label_rule else None,
        )

    return Strategy(
        name="heterofl",
        paper="https://arxiv.org/abs/2010.01264",
        tiers=every_tier,
        plan=plan,
        start=start,
        fold=add,
        finish=finish,
    )
