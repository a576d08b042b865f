"""FedAvg: every device trains the whole model; the server averages, weighted by samples.

Brendan McMahan, Eider Moore, Daniel Ramage, Seth Hampson, Blaise Aguera y Arcas: "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017, https://arxiv.org/abs/1602.05629, algorithm 1.

It is the selective average with one tier, the full one, weights by samples and no label rule, so it runs on the same
accumulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from broker_server.config import StrategyConfig
from broker_server.strategies import heterofl
from broker_server.strategies.strategy import Strategy
from fleet_protocol.errors import PlanError
from models.layout import Layout
from models.tier import Tier

__all__ = ["build"]


def build(config: StrategyConfig) -> Strategy:
    """The strategy as configured.

    Args:
        config: ``weighting`` defaults to samples, ``label_rule`` to off.

    Raises:
        PlanError: a plan is configured, which does not matter to the whole model.
    """
    if config.plan != "static":
        raise PlanError(
            f"{config.name} trains the whole model, so there is nothing for plan = {config.plan!r} to choose; remove it"
        )
    settings = config.model_copy(
        update={
            "weighting": config.weighting or "samples",
            "label_rule": config.label_rule is True,
        }
    )

    def full_tier(layout: Layout, tiers: Sequence[Tier]) -> tuple[Tier, ...]:
        full = layout.tier(1.0)
        if full not in tiers:
            raise PlanError(
                f"{config.name} trains the full tier {full.id}, which is not among those exported and allowed"
            )
        return (full,)

    return replace(heterofl.build(settings), name="fedavg", paper="https://arxiv.org/abs/1602.05629", tiers=full_tier)
