"""Judges global versions of a simulation beside accuracy: own samples, correlation, perplexity.

Correlation is by Matthews: "Comparison of the predicted and observed secondary structure of T4
phage lysozyme", Biochimica et Biophysica Acta, 1975; unlike accuracy it is 0 for a model that
answers by the more frequent label alone. Perplexity is that of HeteroFL's table 3 (Diao, Ding,
Tarokh, ICLR 2021, https://arxiv.org/abs/2010.01264). The released code judges all rows of the test
text together, 64 tokens of each at a time, and that is one chunk. By Jensen's inequality the figure
is no less than exp of the mean of all chunks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from broker_server.rounds.evaluation import Evaluator, load_test_set
from broker_server.rounds.run_context import RunContext
from broker_server.rounds.tier_models import judged_model
from broker_server.store import VersionRecord
from device_runtime.training.labels import label_mask, present_labels
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.data import DataSet
from fleet_protocol.metrics import RULES
from fleet_protocol.targets import Targets
from simulation.data.held import Indices, SampleSplit
from simulation.settings import EvaluationTable

Judge = Callable[[VersionRecord, BlobStore], float]
"""Computes a number for a version that was evaluated before, so that its statistics are known.

It reads the version from the blobs, and raises a BlobError where that fails.
"""


@dataclass(frozen=True)
class Judges:
    """What judges the global versions of a run.

    Attributes:
        evaluator: of the judged tier on the test set; None where the global model cannot be judged.
        local: judges versions on the devices' own parts of the test set, if that is asked for.
        further: more judges, by the name of their column.
    """

    evaluator: Evaluator | None = None
    local: Judge | None = None
    further: Mapping[str, Judge] = field(default_factory=dict)


def chosen_judges(
    table: EvaluationTable,
    context: RunContext,
    split: SampleSplit,
    labels: Targets,
    *,
    own_models: bool,
) -> Judges:
    """Return the judges as configured.

    Args:
        table: what is asked for.
        context: the run.
        split: which samples each device holds.
        labels: of all training samples.
        own_models: whether devices have models of their own. These are judged on their parts of the
            test set instead of the global model.

    `simulation.refusals` has checked that the test set is one for them.

    Raises:
        ConfigError: the judged tier is not exported.
        DataError: the test set cannot be read.
    """
    judging = context.config.evaluation
    if judging.data is None:
        return Judges()
    data = load_test_set(judging.data, context.judged.manifest)
    evaluator = Evaluator(
        context.judged, data, batch_size=judging.batch_size, threads=judging.threads
    )
    further: dict[str, Judge] = {}
    if table.matthews:
        further["matthews"] = _by_correlation(context, evaluator, data)
    if table.perplexity:
        further["perplexity"] = _by_perplexity(context, evaluator, table.perplexity)
    local = None
    if table.local and not own_models:
        local = _by_own_samples(context, evaluator, split, labels)
    return Judges(evaluator, local, further)


def _by_own_samples(
    context: RunContext,
    evaluator: Evaluator,
    split: SampleSplit,
    labels: Targets,
) -> Judge:
    """Judge by the accuracy on every device's own part of the test set (specification 1.6, 2.7).

    Where devices train with a label mask, they are judged with it. All samples count alike, so
    devices with larger parts weigh more.
    """
    classes = context.artifacts.layout.classes
    masked = context.config.train.mask_labels
    ignored = context.judged.manifest.recipe.loss.ignored
    samples: list[Indices] = []
    masks: list[NDArray[np.float32]] = []
    for train, test in zip(split.train, split.test, strict=True):
        if len(test):
            own = labels[train]
            present = present_labels(own[own != ignored], classes)
            samples.append(test)
            masks.append(label_mask(present, classes, masked=masked))

    def judge(version: VersionRecord, blobs: BlobStore) -> float:
        weights, statistics = judged_model(context, version, blobs)
        correct = 0
        count = 0
        for test, mask in zip(samples, masks, strict=True):
            right, judged = evaluator.hits(weights, statistics, test, mask)
            correct += right
            count += judged
        return float(correct / count)

    return judge


def _by_correlation(context: RunContext, evaluator: Evaluator, data: DataSet) -> Judge:
    """Judge by the correlation of predictions with two labels, as CoLA is (specification 3.8)."""
    negatives = np.flatnonzero(data.y == 0)
    positives = np.flatnonzero(data.y == 1)
    no_mask = np.ones(2, np.float32)

    def judge(version: VersionRecord, blobs: BlobStore) -> float:
        weights, statistics = judged_model(context, version, blobs)
        right_negatives, _ = evaluator.hits(weights, statistics, negatives, no_mask)
        right_positives, _ = evaluator.hits(weights, statistics, positives, no_mask)
        return matthews(
            (right_negatives, right_positives),
            (len(negatives), len(positives)),
        )

    return judge


def matthews(correct: tuple[int, int], present: tuple[int, int]) -> float:
    """Compute the correlation of predictions with labels 0 and 1.

    Args:
        correct: how many samples of each label are predicted right.
        present: how many samples of each label there are.

    Returns:
        In [-1, 1]; 0 where only one label is present or predicted.
    """
    right = np.array(correct, np.float64)
    total = np.array(present, np.float64)
    wrong = total - right
    # A label is predicted where it is right, and where the other one is wrong.
    predicted = right + wrong[::-1]
    return RULES["matthews"](right, predicted, total)


def _by_perplexity(context: RunContext, evaluator: Evaluator, samples: int) -> Judge:
    """Judge by the perplexity (specification 1.8).

    Args:
        context: the run.
        evaluator: of the judged tier.
        samples: how many test samples make a chunk: the rows of the test text.
    """

    def judge(version: VersionRecord, blobs: BlobStore) -> float:
        weights, statistics = judged_model(context, version, blobs)
        return perplexity(evaluator.losses(weights, statistics, samples))

    return judge


def perplexity(losses: NDArray[np.floating]) -> float:
    """Return the mean over chunks of exp(mean cross entropy of the chunk, in nats)."""
    by_chunk = np.exp(np.asarray(losses, np.float64))
    return float(by_chunk.mean())
