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
from fleet_protocol.errors import PlanError
from fleet_protocol.frozen import FrozenModel


def build(basis: Basis[FrozenModel | None]) -> Strategy:
    """Build the strategy from its settings; ``label_rule`` defaults to on.

    Raises:
        PlanError: weights by samples, or another way to merge, are configured.
    """
    if basis.weighting == "samples":
        raise PlanError('fedmedian counts every device alike; remove weighting = "samples"')
    if basis.average == "trimmed_mean":
        raise PlanError(
            'fedmedian merges by the median; for robust.merge = "trimmed_mean" take the strategy'
            " heterofl"
        )
    median = heterofl.build(replace(basis, average="median"))
    # The registry compares this with the configured average. A user who names fedmedian need not
    # configure the median a second time.
    merge = replace(median.merge, average=basis.average)
    return replace(
        median,
        name="fedmedian",
        paper="https://arxiv.org/abs/1803.01498",
        merge=merge,
    )


STRATEGIES = {"fedmedian": Method(build)}
