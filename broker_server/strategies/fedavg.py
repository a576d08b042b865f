"""FedAvg: every device trains the whole model; the server averages, weighted by samples.

Brendan McMahan, Eider Moore, Daniel Ramage, Seth Hampson, Blaise Aguera y Arcas: "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017, https://arxiv.org/abs/1602.05629, algorithm 1.

It is the selective average with one tier, the full one, weights by samples and no label rule, so it runs on the same
accumulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from broker_server.strategies import heterofl
from broker_server.strategies.server_optimizer import OptimizerSettings
from broker_server.strategies.strategy import Method, Strategy, StrategySettings
from fleet_protocol.errors import PlanError
from fleet_protocol.frozen import FrozenModel
from models.layout import Layout
from models.tier import Tier

__all__ = ["STRATEGIES", "build"]


def build(
    settings: StrategySettings[FrozenModel | None],
    layout: Layout,
    tiers: Sequence[Tier],
    optimizer: OptimizerSettings | None,
) -> Strategy:
    """The strategy as configured.

    Args:
        settings: ``weighting`` defaults to samples where a mean is taken, ``label_rule`` to off.
        layout: the global model.
        tiers: of which the full one is used.
        optimizer: of the server.

    Raises:
        PlanError: a plan is configured, which does not matter to the whole model; or the full tier is not there.
    """
    if settings.plan != "static":
        raise PlanError(
            f"{settings.name} trains the whole model, so there is nothing for plan = {settings.plan!r} to choose;"
            " remove it"
        )
    full = layout.tier(1.0)
    if full not in tiers:
        raise PlanError(
            f"{settings.name} trains the full tier {full.id}, which is not among those exported and allowed"
        )
    weighting = settings.weighting or ("samples" if settings.average == "mean" else "uniform")
    average = replace(settings, weighting=weighting, label_rule=settings.label_rule is True)
    built = heterofl.build(average, layout, (full,), optimizer)
    return replace(built, name="fedavg", paper="https://arxiv.org/abs/1602.05629")


STRATEGIES = {"fedavg": Method(build)}
