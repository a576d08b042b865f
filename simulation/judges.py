"""Evaluates global versions of a simulation by own samples, correlation and perplexity.

Correlation is by Matthews: "Comparison of the predicted and observed secondary structure of T4
phage lysozyme", Biochimica et Biophysica Acta, 1975; unlike accuracy, it is 0 for a model that
always predicts the more frequent label. Perplexity is that of HeteroFL's table 3 (Diao, Ding,
Tarokh, ICLR 2021, https://arxiv.org/abs/2010.01264). The released code evaluates all rows of the
test text together, 64 tokens of each at a time; that is one chunk. By Jensen's inequality, the
figure is at least exp of the mean over all chunks.
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
from simulation.own_accuracy import Hits
from simulation.settings import EvaluationTable

Judge = Callable[[VersionRecord, BlobStore], float]
"""Computes a number for an evaluated version, whose statistics are therefore known.

It reads the version from the blobs, and raises a BlobError if that fails.
"""

OwnJudge = Callable[[VersionRecord, BlobStore], list[Hits]]
"""Evaluates a version on the samples of each device that has any."""


@dataclass(frozen=True)
class Judges:
    """The evaluations of the global versions of a run.

    Attributes:
        evaluator: evaluates the configured tier on the test set; None if the global model cannot be
            evaluated.
        beside: evaluate the further tiers, in the order of the configuration.
        local: evaluates versions on the devices' parts of the test set, if configured.
        further: more judges, by the name of their column.
    """

    evaluator: Evaluator | None = None
    local: OwnJudge | None = None
    further: Mapping[str, Judge] = field(default_factory=dict)
    beside: tuple[Evaluator, ...] = ()


def chosen_judges(
    table: EvaluationTable,
    context: RunContext,
    split: SampleSplit,
    labels: Targets,
    *,
    devices_judge: bool,
) -> Judges:
    """Return the configured judges.

    Args:
        table: the configuration.
        context: the run.
        split: the samples of each device.
        labels: labels of all training samples.
        devices_judge: whether devices judge what they have trained, on their parts of the test set,
            instead of the global model.

    `simulation.refusals` has checked that the test set supports them.

    Raises:
        ConfigError: an evaluated tier is not exported.
        DataError: the test set cannot be read.
    """
    judging = context.config.evaluation
    # A model that cannot be judged by one test set has no test set here.
    if judging.data is None:
        return Judges()
    data = load_test_set(judging.data, context.judged.manifest)
    # One evaluator for all judges, because it holds the test set and a session.
    evaluator = Evaluator(
        context.judged, data, batch_size=judging.batch_size, threads=judging.threads
    )
    further: dict[str, Judge] = {}
    if table.matthews:
        further["matthews"] = _by_correlation(context, evaluator, data)
    if table.perplexity:
        further["perplexity"] = _by_perplexity(context, evaluator, table.perplexity)
    local = None
    if table.local and not devices_judge:
        local = _by_own_samples(context, evaluator, split, labels)
    return Judges(evaluator, local, further, _beside(context))


def _beside(context: RunContext) -> tuple[Evaluator, ...]:
    """Return the evaluators of the further tiers."""
    judging = context.config.evaluation
    if judging.data is None:
        return ()
    evaluators = []
    for tier in context.judged_beside:
        data = load_test_set(judging.data, tier.manifest)
        evaluators.append(
            Evaluator(tier, data, batch_size=judging.batch_size, threads=judging.threads)
        )
    return tuple(evaluators)


def _by_own_samples(
    context: RunContext,
    evaluator: Evaluator,
    split: SampleSplit,
    labels: Targets,
) -> OwnJudge:
    """Count right answers on every device's part of the test set (specification 1.6, 2.7).

    If devices train with a label mask, the evaluation uses it.
    """
    classes = context.artifacts.layout.classes
    masked = context.config.train.mask_labels
    ignored = context.judged.manifest.recipe.loss.ignored
    samples: list[Indices] = []
    masks: list[NDArray[np.float32]] = []
    for train, test in zip(split.train, split.test, strict=True):
        # Devices without test samples have no accuracy to count.
        if len(test):
            own = labels[train]
            # An ignored label does not count among the labels of a device.
            present = present_labels(own[own != ignored], classes)
            samples.append(test)
            masks.append(label_mask(present, classes, masked=masked))

    def judge(version: VersionRecord, blobs: BlobStore) -> list[Hits]:
        weights, statistics = judged_model(context, version, blobs)
        hits = []
        for test, mask in zip(samples, masks, strict=True):
            correct, count = evaluator.hits(weights, statistics, test, mask)
            # The labels of a device may all be ignored.
            if count:
                hits.append(Hits(correct, count))
        return hits

    return judge


def _by_correlation(context: RunContext, evaluator: Evaluator, data: DataSet) -> Judge:
    """Compute the correlation of predictions with two labels, as for CoLA (specification 3.8)."""
    negatives = np.flatnonzero(data.y == 0)
    positives = np.flatnonzero(data.y == 1)
    # Both labels are present on the server, so nothing is masked.
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
        correct: number of correctly predicted samples of each label.
        present: number of samples of each label.

    Returns:
        In [-1, 1]; 0 if only one label is present or predicted.
    """
    right = np.array(correct, np.float64)
    total = np.array(present, np.float64)
    wrong = total - right
    # A label is predicted if it is correct, or if the other label is wrong.
    predicted = right + wrong[::-1]
    return RULES["matthews"](right, predicted, total)


def _by_perplexity(context: RunContext, evaluator: Evaluator, samples: int) -> Judge:
    """Compute the perplexity (specification 1.8).

    Args:
        context: the run.
        evaluator: evaluator of the configured tier.
        samples: number of test samples in a chunk: the rows of the test text.
    """

    def judge(version: VersionRecord, blobs: BlobStore) -> float:
        weights, statistics = judged_model(context, version, blobs)
        return perplexity(evaluator.losses(weights, statistics, samples))

    return judge


def perplexity(losses: NDArray[np.floating]) -> float:
    """Return the mean over chunks of exp(mean cross entropy of the chunk, in nats)."""
    by_chunk = np.exp(np.asarray(losses, np.float64))
    return float(by_chunk.mean())
