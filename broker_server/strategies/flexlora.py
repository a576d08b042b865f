"""FlexLoRA: the products of adapters are averaged, and the average is cut to each rank by its
singular values.

Jiamu Bai, Daoyuan Chen, Bingchen Qian, Liuyi Yao, Yaliang Li: "Federated Fine-tuning of Large
Language Models under Heterogeneous Tasks and Client Resources", NeurIPS 2024,
https://arxiv.org/abs/2402.11505. With W the mean of up @ down, weighted by samples, and U S V its
singular value decomposition, the new adapter is up = U S and down = V, as far as the whole rank
goes. Its units are in the order of their singular values, so the leading r, which a tier of rank r
is sent, are the best approximation of that rank. All else that trains is averaged as in HeteroFL.
"""

from dataclasses import replace

import numpy as np

from broker_server.strategies.low_rank import Folding, Pair, Pieces, merge_adapters
from broker_server.strategies.strategy import Basis, Method, Strategy
from fleet_protocol.errors import PlanError
from fleet_protocol.frozen import FrozenModel


def _factored(mean: Pieces, old: Pair) -> Pair:
    """The product as a pair of the whole rank.

    A rank beyond the size of the matrix keeps its old `down`, unused.
    """
    if not np.isfinite(mean[0]).all():  # whoever takes the result checks that it is finite
        return Pair(np.full_like(old.up, np.nan), old.down)
    left, values, right = np.linalg.svd(mean[0], full_matrices=False)
    kept = min(len(values), old.down.shape[0])
    up = np.zeros_like(old.up)
    down = old.down.copy()
    up[:, :kept] = left[:, :kept] * values[:kept]
    down[:kept] = right[:kept]
    return Pair(up, down)


def build(basis: Basis[FrozenModel | None]) -> Strategy:
    """The strategy as configured; ``weighting`` defaults to samples, ``label_rule`` to on.

    Raises:
        PlanError: the model has no adapters, the plan is not static, or the server has an
            optimizer: factors of another round have other units, so there is no step from one to
            the other.
    """
    if basis.optimizer is not None:
        raise PlanError(
            "flexlora factors its adapters anew in each round; remove [server_optimizer], or take hetlora"
        )
    weighted = replace(basis, weighting=basis.weighting or "samples")
    built = merge_adapters(
        Folding(lambda pair, _: (pair.up @ pair.down,), lambda _: 1.0, _factored),
        weighted,
    )
    return replace(built, paper="https://arxiv.org/abs/2402.11505", renews_units=True)


STRATEGIES = {"flexlora": Method(build)}
