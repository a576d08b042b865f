"""HetLoRA: adapters of unequal rank, padded with zeros and weighted by how much each device's
adapter does.

Yae Jee Cho, Luyang Liu, Zheng Xu, Aldi Fahrezi, Gauri Joshi: "Heterogeneous LoRA for Federated
Fine-tuning of On-Device Foundation Models", EMNLP 2024, https://arxiv.org/abs/2401.06432. A device
of rank r is sent the first r units. Its update is padded to the whole rank with zeros and weighted
by the Frobenius norm of up @ down (sparsity-weighted aggregation), each adapter by itself; all else
that trains is averaged as in HeteroFL. That devices prune their own ranks is not part of it: a rank
belongs to a tier, whose graphs are made at export.
"""

from dataclasses import replace

import numpy as np

from broker_server.strategies.low_rank import Folding, Pair, Pieces, merge_adapters
from broker_server.strategies.strategy import Basis, Method, Strategy
from fleet_protocol.frozen import FrozenModel


def _padded(pair: Pair, rank: int) -> Pieces:
    lacks = rank - pair.up.shape[1]
    return np.pad(pair.up, ((0, 0), (0, lacks))), np.pad(pair.down, ((0, lacks), (0, 0)))


def _norm(pair: Pair) -> float:
    """Of the product, from its factors: a trace of two small matrices."""
    above = pair.up.astype(np.float64)
    below = pair.down.astype(np.float64)
    return float(np.sqrt(max(0.0, np.sum((above.T @ above) * (below @ below.T)))))


def build(basis: Basis[FrozenModel | None]) -> Strategy:
    """The strategy as configured; ``weighting`` defaults to uniform, ``label_rule`` to on.

    Raises:
        PlanError: the model has no adapters, or the plan is not static.
    """
    built = merge_adapters(Folding(_padded, _norm, lambda mean, _: Pair(*mean)), basis)
    return replace(built, paper="https://arxiv.org/abs/2401.06432")


STRATEGIES = {"hetlora": Method(build)}
