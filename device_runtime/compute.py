"""One task from weights on disk to an update on disk; runs in the worker thread."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_runtime.backends import ForwardSession, Sessions, step_graph_key
from device_runtime.board import installed_backends, peak_resident_bytes
from device_runtime.data import DataSet
from device_runtime.personal import Personal, train_personal
from device_runtime.task_store import TaskRecord
from device_runtime.training import (
    counted_labels,
    evaluate,
    holdout_split,
    label_mask,
    measure,
    present_labels,
    self_test,
    train,
)
from device_runtime.weights_file import read_weights
from device_runtime.work import Job
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.manifest import Manifest
from fleet_protocol.messages import BlobRef, Evaluation, Offer, TaskMetrics
from fleet_protocol.weights import encode_weights

__all__ = ["Bench", "Outcome", "SelfTested", "compute", "needed_graphs"]

Tensors = dict[str, NDArray[Any]]
EVAL, STATS = "onnx/eval", "onnx/stats"


@dataclass(frozen=True)
class Bench:
    """What a board computes with; the same for every task.

    Attributes:
        data: its samples.
        blobs: its blobs.
        backend: ``onnx`` or ``ort-training``.
        threads: threads of one operator.
        holdout: share of the samples kept for evaluation.
        personal: the board's own model, None if it has none.
        sessions: opens the graphs; None opens each anew on `threads`.
        parts: training and held-out indices to use instead of a split by `holdout`.
    """

    data: DataSet
    blobs: BlobStore
    backend: str
    threads: int
    holdout: float
    personal: Personal | None = None
    sessions: Sessions | None = None
    parts: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None

    @property
    def examples(self) -> int:
        """Number of training samples."""
        return len(self.split()[0])

    def split(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Indices of the training and of the held-out samples."""
        return self.parts or holdout_split(len(self.data), self.holdout)

    @property
    def opening(self) -> Sessions:
        """What opens the graphs."""
        return self.sessions or Sessions(self.threads)


@dataclass(frozen=True)
class SelfTested:
    """A train graph passed its self-test.

    Attributes:
        name: graph and runtime, as kept in the cache's index.
    """

    name: str


@dataclass(frozen=True)
class Outcome:
    """A finished update.

    Attributes:
        update: on disk.
        metrics: what goes with it.
        step_seconds: mean time of a training step, None of a statistics pass.
    """

    update: BlobRef
    metrics: TaskMetrics
    step_seconds: float | None


def needed_graphs(manifest: Manifest, offer: Offer, bench: Bench) -> tuple[str, ...]:
    """The graphs of a set that a task runs on this board.

    Args:
        manifest: of the set.
        offer: the task.
        bench: the board.

    Returns:
        Keys of ``manifest.graphs``, the step first; none in mutual learning, whose graphs are on the board.

    Raises:
        RefusedError: the set has no graph for this board's backend.
    """
    if offer.kind == "statistics":
        wanted: list[str | None] = [STATS]
    elif offer.train.mutual is not None:
        wanted = []
    else:
        wanted = [step_graph_key(bench.backend, manifest)]
        _, held_out = bench.split()
        if len(held_out) and EVAL in manifest.graphs:
            wanted += [EVAL, *([STATS] if manifest.statistics else [])]
    missing = [key for key in wanted if key is None or key not in manifest.graphs]
    if missing:
        raise RefusedError(
            RefusalReason.UNSUPPORTED,
            f"artifact set {manifest.arch} {manifest.tier} has no graph for "
            f"{'statistics' if offer.kind == 'statistics' else f'backend {bench.backend}'} "
            f"(it has {', '.join(sorted(manifest.graphs))}); export it again",
        )
    return tuple(key for key in wanted if key is not None)


def _weights(manifest: Manifest, bench: Bench, digest: str) -> Tensors:
    return read_weights(bench.blobs.path(digest), manifest)


def _session(manifest: Manifest, bench: Bench, key: str, parameters: Tensors) -> ForwardSession:
    graph = bench.blobs.path(manifest.graphs[key].digest)
    return bench.opening.forward(manifest, graph, parameters)


def _keep(record: TaskRecord, bench: Bench, tensors: Tensors) -> BlobRef:
    offer = record.offer
    metadata = {
        "task": offer.task,
        "run": offer.run,
        "round": str(offer.round),
        "version": str(offer.version),
        "tier": record.tier,
    }
    data = encode_weights(tensors, metadata)
    chunk_bytes = record.choice.weights.chunk_bytes
    return BlobRef(digest=bench.blobs.put(data), size=len(data), chunk_bytes=chunk_bytes)


def _train(record: TaskRecord, manifest: Manifest, bench: Bench, tested: frozenset[str], job: Job) -> tuple[Any, ...]:
    """Train; returns the parameters and what training said, after its session is gone."""
    key = step_graph_key(bench.backend, manifest)
    if key is None:
        raise RefusedError(RefusalReason.UNSUPPORTED, f"no step for backend {bench.backend} in {manifest.tier}")
    session = bench.opening.train(manifest, bench.blobs.path(manifest.graphs[key].digest))
    name = f"{key} {installed_backends()[bench.backend]}"
    if name not in tested:
        self_test(session, manifest)
        job.report(SelfTested(name))
    read_weights(bench.blobs.path(record.choice.weights.digest), manifest, into=session.reset())
    session.anchor(record.offer.train.proximal_mu)
    chosen, _ = bench.split()
    result = train(
        session,
        manifest,
        bench.data,
        chosen,
        record.offer.train,
        record.offer.round,
        report=job.report,
        stopped=job.stopped,
    )
    return session.parameters(), result


def _evaluate(record: TaskRecord, manifest: Manifest, bench: Bench, parameters: Tensors, job: Job) -> Evaluation | None:
    """Loss and accuracy of the sub-model on the held-out samples, its norms fed with the board's own statistics."""
    chosen, held_out = bench.split()
    graphs = needed_graphs(manifest, record.offer, bench)
    settings, round_number = record.offer.train, record.offer.round
    if not counted_labels(bench.data.y[held_out]):
        return None
    if EVAL not in graphs or (manifest.statistics and (len(chosen) < 2 or settings.batch_size < 2)):
        return None
    statistics: Tensors = {}
    if manifest.statistics:
        session = _session(manifest, bench, STATS, parameters)
        statistics, _ = measure(session, manifest, bench.data, chosen, settings, round_number, stopped=job.stopped)
        del session
    mask = label_mask(present_labels(bench.data.y[chosen]), manifest.classes, masked=settings.mask_labels)
    return evaluate(
        _session(manifest, bench, EVAL, parameters),
        manifest,
        bench.data,
        held_out,
        settings.batch_size,
        mask,
        statistics,
        stopped=job.stopped,
    )


def compute(
    record: TaskRecord, manifest: Manifest, bench: Bench, tested: frozenset[str], fetch_seconds: float, job: Job
) -> Outcome:
    """Do a task and keep its update.

    Args:
        record: the task.
        manifest: of the artifact set taken.
        bench: the board.
        tested: graphs that passed their self-test here.
        fetch_seconds: for the metrics.
        job: reports epochs and self-tests, and says when to stop.

    Raises:
        TaskStopped: the job was cancelled.
        DataError: the data does not fit the model.
        RefusedError: a self-test failed, or a loss, parameter or statistic is not finite, or the personal model of
            mutual learning is missing or goes with another model.
        ConfigError: a file of the personal model's set is missing or damaged.
        BlobError: a blob is damaged on disk.
        StorageError: the update cannot be written.
    """
    offer = record.offer
    mutual = offer.train.mutual if offer.kind == "train" else None
    if mutual is None:
        bench.data.check(manifest.input_shape, manifest.input_dtype, manifest.classes, manifest.label_shape)
    chosen, held_out = bench.split()
    started = time.monotonic()
    loss = mean_loss = evaluation = step_seconds = None
    if offer.kind == "statistics":
        parameters = _weights(manifest, bench, record.choice.weights.digest)
        session = _session(manifest, bench, STATS, parameters)
        tensors, count = measure(session, manifest, bench.data, chosen, offer.train, offer.round, stopped=job.stopped)
        seconds = time.monotonic() - started
    elif mutual is not None:
        learnt = train_personal(
            bench.personal,
            manifest,
            _weights(manifest, bench, record.choice.weights.digest),
            offer,
            bench.data,
            chosen,
            held_out,
            threads=bench.threads,
            report=job.report,
            stopped=job.stopped,
        )
        tensors, count, loss, seconds = learnt.update, learnt.steps, learnt.loss, learnt.seconds
        step_seconds, evaluation = seconds / max(count, 1), learnt.evaluation
    else:
        tensors, result = _train(record, manifest, bench, tested, job)
        count, loss, mean_loss, seconds = result.steps, result.loss, result.mean_loss, result.seconds
        step_seconds = seconds / max(count, 1)
        evaluation = _evaluate(record, manifest, bench, tensors, job)
    update = _keep(record, bench, tensors)
    labels = present_labels(bench.data.y[chosen])
    metrics = TaskMetrics(
        examples=len(chosen),
        batches=count,
        labels=() if mutual is not None and mutual.stays else tuple(int(label) for label in labels),
        train_loss=loss,
        mean_loss=mean_loss,
        fetch_seconds=fetch_seconds,
        train_seconds=seconds,
        resident_bytes=peak_resident_bytes(),
        evaluation=evaluation,
    )
    return Outcome(update, metrics, step_seconds)
