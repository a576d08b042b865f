"""FedProx: FedAvg whose devices are pulled back towards the weights they were sent.

Tian Li, Anit Kumar Sahu, Manzil Zaheer, Maziar Sanjabi, Ameet Talwalkar, Virginia Smith: "Federated Optimization in
Heterogeneous Networks", MLSys 2020, https://arxiv.org/abs/1812.06127, algorithm 2.

A device minimises ``F_k(w) + mu / 2 * |w - w_t|^2`` with ``w_t`` the weights of the round. The pull is an input of the
train graph, so mu is all that the server has to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pydantic import Field

from broker_server.strategies import fedavg
from broker_server.strategies.server_optimizer import OptimizerSettings
from broker_server.strategies.strategy import Method, Strategy, StrategySettings
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages import Instructions
from models.layout import Layout
from models.tier import Tier

__all__ = ["STRATEGIES", "FedProxSettings", "build"]


class FedProxSettings(FrozenModel):
    """``[strategy.fedprox]``.

    Attributes:
        mu: pull of a device's weights towards those the round started from.
    """

    mu: float = Field(default=0.01, gt=0)


def build(
    settings: StrategySettings[FedProxSettings],
    layout: Layout,
    tiers: Sequence[Tier],
    optimizer: OptimizerSettings | None,
) -> Strategy:
    """The strategy as configured.

    Args:
        settings: ``mu``; the rest as for FedAvg.
        layout: the global model.
        tiers: of which the full one is used.
        optimizer: of the server.

    Raises:
        PlanError: as for FedAvg.
    """

    def instruct(instructions: Instructions, _closed_rounds: int) -> Instructions:
        train = instructions.train.model_copy(update={"proximal_mu": settings.own.mu})
        return instructions.model_copy(update={"train": train})

    return replace(
        fedavg.build(settings, layout, tiers, optimizer),
        name="fedprox",
        paper="https://arxiv.org/abs/1812.06127",
        instruct=instruct,
    )


STRATEGIES = {"fedprox": Method(build, FedProxSettings)}
