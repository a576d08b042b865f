"""Local accuracy: the global model on every device's own part of the test set (specification 1.6, 2.7).

Where devices train with a label mask, they are judged with it.
All samples count alike, so devices with larger parts weigh more.
"""

from __future__ import annotations

import numpy as np

from broker_server.rounds.evaluation import Evaluator
from broker_server.rounds.run_context import RunContext
from broker_server.rounds.tier_models import judged_model
from broker_server.store import VersionRecord
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.data import DataSet
from fleet_protocol.errors import ConfigError
from simulation.data.held import Parts

__all__ = ["LocalJudge"]


class LocalJudge:
    """Judges global versions locally.

    Args:
        context: the run.
        evaluator: of the judged tier.
        data: the whole test set.
        parts: which of it belongs to which device.

    Raises:
        ConfigError: the split gives the devices no part of the test set.
    """

    def __init__(self, context: RunContext, evaluator: Evaluator, data: DataSet, parts: Parts) -> None:
        if not any(map(len, parts.test)):
            raise ConfigError(
                'evaluation.local: this split has no test samples of each device\'s kind; use partition kind = "iid" '
                'or "shards"'
            )
        self._context = context
        self._evaluator = evaluator
        self._parts = [part for part in parts.test if len(part)]
        self._labels = [np.unique(data.y[part]) for part in self._parts]

    def judge(self, version: VersionRecord, blobs: BlobStore) -> float:
        """Accuracy over all devices' parts.

        Args:
            version: that was judged globally before, so that its statistics are known.
            blobs: where it lies.

        Raises:
            BlobError: it cannot be read.
        """
        layout = self._context.artifacts.layout
        weights, statistics = judged_model(self._context, version, blobs)
        masked = self._context.config.train.mask_labels  # as in the training, or the logits would be others
        correct = count = 0
        for part, labels in zip(self._parts, self._labels, strict=True):
            mask = np.zeros(layout.classes, np.float32) if masked else np.ones(layout.classes, np.float32)
            mask[labels] = 1
            hits, counted = self._evaluator.hits(weights, statistics, part, mask)
            correct, count = correct + hits, count + counted
        return correct / count
