"""Perplexity as HeteroFL's table 3 has it: the mean over chunks of exp(mean cross entropy), specification 1.8.

Diao, Ding, Tarokh: "HeteroFL: Computation and communication efficient federated learning for heterogeneous clients",
ICLR 2021, https://arxiv.org/abs/2010.01264. The released code judges all rows of the test text together, 64 tokens of
each at a time, and that is one chunk. By Jensen's inequality the figure is no less than exp of the mean of all chunks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from broker_server.rounds.evaluation import Evaluator
from broker_server.rounds.run_context import RunContext
from broker_server.rounds.tier_models import judged_model
from broker_server.store import VersionRecord
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.data import DataSet
from fleet_protocol.errors import ConfigError

__all__ = ["PerplexityJudge", "perplexity"]


def perplexity(losses: NDArray[np.floating]) -> float:
    """The mean over chunks of exp(mean cross entropy of the chunk).

    Args:
        losses: mean cross entropy of each chunk, in nats.
    """
    return float(np.exp(np.asarray(losses, np.float64)).mean())


class PerplexityJudge:
    """Computes the perplexity of global versions on the test set.

    Args:
        context: the run.
        evaluator: of the judged tier.
        data: the test set, one chunk after the other.
        samples: test samples that make a chunk, the rows of the test text.

    Raises:
        ConfigError: the test set is not made of whole chunks.
    """

    def __init__(self, context: RunContext, evaluator: Evaluator, data: DataSet, samples: int) -> None:
        if len(data) % samples:
            raise ConfigError(
                f"evaluation.perplexity = {samples}, but the {len(data)} test samples do not make chunks of {samples};"
                " set it to the rows of the test text, and limit the text by data.options.test_chunks, not test_limit"
            )
        self._context = context
        self._evaluator = evaluator
        self._samples = samples

    def judge(self, version: VersionRecord, blobs: BlobStore) -> float:
        """The perplexity of one version.

        Args:
            version: that was judged before, so that its statistics are known.
            blobs: where it lies.

        Raises:
            BlobError: it cannot be read.
        """
        weights, statistics = judged_model(self._context, version, blobs)
        return perplexity(self._evaluator.losses(weights, statistics, self._samples))
