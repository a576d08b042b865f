"""HetLoRA: pads adapters of unequal rank with zeros, and weights them by their norms.

Yae Jee Cho, Luyang Liu, Zheng Xu, Aldi Fahrezi, Gauri Joshi: "Heterogeneous LoRA for Federated
Fine-tuning of On-Device Foundation Models", EMNLP 2024, https://arxiv.org/abs/2401.06432. A device
of rank r is sent the first r units. Its update is padded to the whole rank with zeros and weighted
by the Frobenius norm of up @ down (sparsity-weighted aggregation), each adapter by itself; all
other trained parameters are averaged as in HeteroFL. Shoal leaves out that devices prune their
ranks: a rank belongs to a tier, whose graphs are made at export.
"""

from dataclasses import replace

import numpy as np

from broker_server.strategies.low_rank import AdapterMerge, Pair, Terms, merge_adapters
from broker_server.strategies.strategy import Basis, Method, Strategy
from fleet_protocol.frozen import FrozenModel


def _pad(pair: Pair, rank: int) -> Terms:
    missing = rank - pair.up.shape[1]
    up = np.pad(pair.up, ((0, 0), (0, missing)))
    down = np.pad(pair.down, ((0, missing), (0, 0)))
    return up, down


def _norm(pair: Pair) -> float:
    """Return the Frobenius norm of up @ down.

    Its square is the trace of a product of two [r, r] matrices, so the large product is never
    computed.
    """
    up = pair.up.astype(np.float64)
    down = pair.down.astype(np.float64)
    trace = np.sum((up.T @ up) * (down @ down.T))
    # Rounding may give a value a little below 0.
    return float(np.sqrt(max(0.0, trace)))


def _pair(mean: Terms, _old: Pair) -> Pair:
    up, down = mean
    return Pair(up, down)


def build(basis: Basis[FrozenModel | None]) -> Strategy:
    """Build the strategy from its settings.

    ``weighting`` defaults to uniform, ``label_rule`` to on.

    Raises:
        PlanError: the model has no adapters, or the plan is not static.
    """
    strategy = merge_adapters(AdapterMerge(terms=_pad, weight=_norm, finish=_pair), basis)
    return replace(strategy, paper="https://arxiv.org/abs/2401.06432")


STRATEGIES = {"hetlora": Method(build)}
