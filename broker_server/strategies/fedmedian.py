"""FedMedian: the median of the devices' values of each entry.

A few broken or malicious devices cannot move a median.

Dong Yin, Yudong Chen, Kannan Ramchandran, Peter Bartlett: "Byzantine-Robust Distributed Learning:
Towards Optimal Statistical Rates", ICML 2018, https://arxiv.org/abs/1803.01498, algorithm 1, option
I (the coordinate-wise median).

It is HeteroFL with the merge of `broker_server.strategies.robust_merge`, which other strategies get
with ``[robust] merge``.
"""

from dataclasses import replace

from broker_server.strategies import heterofl
from broker_server.strategies.strategy import Basis, Method, Strategy
from broker_server.strategies.traits import Trait
from fleet_protocol.frozen import FrozenModel


def build(basis: Basis[FrozenModel | None]) -> Strategy:
    """Build the strategy from its settings; ``label_rule`` defaults to on."""
    median = heterofl.build(replace(basis, average="median"))
    return replace(
        median,
        name="fedmedian",
        paper="https://arxiv.org/abs/1803.01498",
        # An order of values has no weights, and its middle is not a mean.
        needs=median.needs | {Trait.ALIKE},
        breaks=median.breaks | {Trait.MEAN_OF_CHANGES},
    )


STRATEGIES = {"fedmedian": Method(build)}
