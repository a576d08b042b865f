"""The correlation of predictions with two labels, by which CoLA is judged (specification 3.8).

Matthews: "Comparison of the predicted and observed secondary structure of T4 phage lysozyme", Biochimica et Biophysica
Acta, 1975. Unlike accuracy it is 0 for a model that answers by the more frequent label alone.
"""

from __future__ import annotations

import math

import numpy as np

from broker_server.rounds.evaluation import Evaluator
from broker_server.rounds.run_context import RunContext
from broker_server.rounds.tier_models import judged_model
from broker_server.store import VersionRecord
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.data import DataSet
from fleet_protocol.errors import ConfigError

__all__ = ["MatthewsJudge", "matthews"]


def matthews(found: tuple[int, int], present: tuple[int, int]) -> float:
    """Correlation of predictions with labels.

    Args:
        found: how many samples of labels 0 and 1 are predicted right.
        present: how many there are of each.

    Returns:
        In [-1, 1]; 0 where only one label is present or predicted.
    """
    right_0, right_1 = found
    wrong_0, wrong_1 = present[0] - right_0, present[1] - right_1
    spread = math.prod((right_1 + wrong_0, right_0 + wrong_1, *present))
    return (right_0 * right_1 - wrong_0 * wrong_1) / math.sqrt(spread) if spread else 0.0


class MatthewsJudge:
    """Correlates the predictions of global versions with the labels of the test set.

    Args:
        context: the run.
        evaluator: of the judged tier.
        data: the test set.

    Raises:
        ConfigError: the test set has not two labels, one for each sample.
    """

    def __init__(self, context: RunContext, evaluator: Evaluator, data: DataSet) -> None:
        classes = context.artifacts.layout.classes
        if classes != 2 or data.y.ndim != 1:
            raise ConfigError(
                f"evaluation.matthews is for 2 labels, one for each sample; here are {classes} labels; leave it off"
            )
        self._context = context
        self._evaluator = evaluator
        self._members = (np.flatnonzero(data.y == 0), np.flatnonzero(data.y == 1))

    def judge(self, version: VersionRecord, blobs: BlobStore) -> float:
        """The correlation of one version.

        Args:
            version: that was judged before, so that its statistics are known.
            blobs: where it lies.

        Raises:
            BlobError: it cannot be read.
        """
        weights, statistics = judged_model(self._context, version, blobs)
        mask = np.ones(2, np.float32)
        right = [self._evaluator.hits(weights, statistics, chosen, mask)[0] for chosen in self._members]
        return matthews((right[0], right[1]), (len(self._members[0]), len(self._members[1])))
