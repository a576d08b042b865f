"""FedProx: FedAvg whose devices are pulled back towards the weights they were sent.

Tian Li, Anit Kumar Sahu, Manzil Zaheer, Maziar Sanjabi, Ameet Talwalkar, Virginia Smith: "Federated Optimization in
Heterogeneous Networks", MLSys 2020, https://arxiv.org/abs/1812.06127, algorithm 2.

A device minimises ``F_k(w) + mu / 2 * |w - w_t|^2`` with ``w_t`` the weights of the round. The pull is an input of the
train graph, so mu is all that the server has to say.
"""

from __future__ import annotations

from dataclasses import replace

from broker_server.config import StrategyConfig
from broker_server.strategies import fedavg
from broker_server.strategies.strategy import Strategy

__all__ = ["build"]


def build(config: StrategyConfig) -> Strategy:
    """The strategy as configured.

    Args:
        config: ``fedprox.mu``; the rest as for FedAvg.
    """
    return replace(
        fedavg.build(config),
        name="fedprox",
        paper="https://arxiv.org/abs/1812.06127",
        train=lambda settings, _layout, _closed: settings.model_copy(update={"proximal_mu": config.fedprox.mu}),
    )
