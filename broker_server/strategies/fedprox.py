"""FedProx: FedAvg whose devices are pulled back towards the weights that they received.

Tian Li, Anit Kumar Sahu, Manzil Zaheer, Maziar Sanjabi, Ameet Talwalkar, Virginia Smith: "Federated
Optimization in Heterogeneous Networks", MLSys 2020, https://arxiv.org/abs/1812.06127, algorithm 2.

A device minimises ``F_k(w) + mu / 2 * |w - w_t|^2`` with ``w_t`` the weights of the round. The pull
is an input of the train graph, so the server only sends mu.
"""

from dataclasses import replace

from pydantic import Field

from broker_server.strategies import fedavg
from broker_server.strategies.strategy import Basis, Method, Strategy
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages import Instructions


class FedProxSettings(FrozenModel):
    """``[strategy.fedprox]``.

    Attributes:
        mu: strength of the proximal term, which pulls a device's weights towards the weights at the
            start of the round.
    """

    mu: float = Field(default=0.01, gt=0)


def build(basis: Basis[FedProxSettings]) -> Strategy:
    """Build FedAvg with the pull ``mu``; the errors are those of FedAvg."""
    mu = basis.options.mu

    def instruct(instructions: Instructions, _closed_rounds: int) -> Instructions:
        train = instructions.train.model_copy(update={"proximal_mu": mu})
        return instructions.model_copy(update={"train": train})

    return replace(
        fedavg.build(basis),
        name="fedprox",
        paper="https://arxiv.org/abs/1812.06127",
        instruct=instruct,
    )


STRATEGIES = {"fedprox": Method(build, FedProxSettings)}
