"""FlexLoRA: averages the products of adapters, and cuts the average to each rank by an SVD.

Jiamu Bai, Daoyuan Chen, Bingchen Qian, Liuyi Yao, Yaliang Li: "Federated Fine-tuning of Large
Language Models under Heterogeneous Tasks and Client Resources", NeurIPS 2024,
https://arxiv.org/abs/2402.11505. With W the mean of up @ down, weighted by samples, and U S V its
singular value decomposition, the new adapter is up = U S and down = V, cut to the whole rank. Its
units are in the order of their singular values, so the leading r, which a tier of rank r is sent,
are the best approximation of that rank. All other trained parameters are averaged as in HeteroFL.
"""

from dataclasses import replace

import numpy as np

from broker_server.strategies.low_rank import AdapterMerge, Pair, Terms, merge_adapters
from broker_server.strategies.strategy import Basis, Method, Strategy
from broker_server.strategies.traits import Trait
from fleet_protocol.errors import PlanError
from fleet_protocol.frozen import FrozenModel


def _product(pair: Pair, _rank: int) -> Terms:
    return (pair.up @ pair.down,)


def _equal_weight(_pair: Pair) -> float:
    return 1.0


def _factor(mean: Terms, old: Pair) -> Pair:
    """Factor the mean product into a pair of the whole rank.

    A rank beyond the size of the matrix keeps its old `down`, unused.
    """
    (product,) = mean
    if not np.isfinite(product).all():
        # The decomposition would raise an error. The caller checks that the result is finite.
        return Pair(np.full_like(old.up, np.nan), old.down)
    u, s, v = np.linalg.svd(product, full_matrices=False)
    rank = min(len(s), old.down.shape[0])
    up = np.zeros_like(old.up)
    down = old.down.copy()
    up[:, :rank] = u[:, :rank] * s[:rank]
    down[:rank] = v[:rank]
    return Pair(up, down)


def build(basis: Basis[FrozenModel | None]) -> Strategy:
    """Build the strategy from its settings.

    ``weighting`` defaults to samples, ``label_rule`` to on.

    Raises:
        PlanError: the model has no adapters, the plan is not static, or the server has an
            optimizer: factors of different rounds have different units, so there is no step from
            one to the other.
    """
    if basis.optimizer is not None:
        raise PlanError(
            "flexlora factors its adapters again in each round; remove [server_optimizer], "
            "or use hetlora"
        )
    strategy = merge_adapters(
        AdapterMerge(terms=_product, weight=_equal_weight, finish=_factor),
        replace(basis, weighting=basis.weighting or "samples"),
    )
    return replace(
        strategy,
        paper="https://arxiv.org/abs/2402.11505",
        renews_units=True,
        breaks=strategy.breaks | {Trait.FIXED_PLANS},
    )


STRATEGIES = {"flexlora": Method(build)}
