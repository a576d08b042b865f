"""FedAvg: every device trains the whole model, and the server averages, weighted by samples.

Brendan McMahan, Eider Moore, Daniel Ramage, Seth Hampson, Blaise Aguera y Arcas:
"Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
https://arxiv.org/abs/1602.05629, algorithm 1.

It is the selective average with one tier, the full one, weights by samples and no label rule, so it
runs on the same accumulator.
"""

from dataclasses import replace

from broker_server.strategies import heterofl
from broker_server.strategies.strategy import Basis, Method, Strategy, Weighting
from fleet_protocol.errors import PlanError
from fleet_protocol.frozen import FrozenModel


def build(basis: Basis[FrozenModel | None]) -> Strategy:
    """Build the strategy from its settings.

    ``weighting`` defaults to samples if a mean is taken, ``label_rule`` to off.

    Raises:
        PlanError: a plan is configured, which has no meaning for the whole model; or the full tier
            is not in use.
    """
    if basis.plan != "static":
        raise PlanError(
            f"{basis.name} trains the whole model, so plan = {basis.plan!r} has nothing to "
            "choose; remove it"
        )
    full_tier = basis.layout.tier(1.0)
    if full_tier not in basis.tiers:
        raise PlanError(
            f"{basis.name} trains the full tier {full_tier.id}, which is not among those exported"
            " and allowed"
        )
    # A median or a trimmed mean has no weights.
    default: Weighting = "samples" if basis.average == "mean" else "uniform"
    selective_average = heterofl.build(
        replace(
            basis,
            weighting=basis.weighting or default,
            label_rule=basis.label_rule is True,
            tiers=(full_tier,),
        )
    )
    return replace(selective_average, name="fedavg", paper="https://arxiv.org/abs/1602.05629")


STRATEGIES = {"fedavg": Method(build)}
