"""FedMedian: the median of the values that devices have for an entry.

Few broken or malicious devices cannot move a median.

Dong Yin, Yudong Chen, Kannan Ramchandran, Peter Bartlett: "Byzantine-Robust Distributed Learning:
Towards Optimal Statistical Rates", ICML 2018, https://arxiv.org/abs/1803.01498, algorithm 1, option
I (the coordinate-wise median).

It is HeteroFL with the merge of `broker_server.strategies.robust_merge`, which other strategies get
by ``[robust] merge``.
"""

from dataclasses import replace

from broker_server.strategies import heterofl
from broker_server.strategies.strategy import Basis, Method, Strategy
from fleet_protocol.frozen import FrozenModel


def build(basis: Basis[FrozenModel | None]) -> Strategy:
    """Build the strategy from its settings; ``label_rule`` defaults to on."""
    median = heterofl.build(replace(basis, average="median"))
    return replace(median, name="fedmedian", paper="https://arxiv.org/abs/1803.01498")


STRATEGIES = {"fedmedian": Method(build)}
