"""From a round's updates on disk to a new global version in the store."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from broker_server.folding import Folding
from broker_server.planning import RunContext, compiled_plans
from broker_server.store import Store, TaskRecord, VersionRecord
from broker_server.strategies import Contribution
from broker_server.tensors import open_state, open_tensors
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.weights import encode_weights

__all__ = ["begin_folding", "first_version", "make_version"]


def begin_folding(
    context: RunContext, tasks: Sequence[TaskRecord], current: Callable[[str], TaskRecord], updates: BlobStore
) -> Folding:
    """An empty merge of a round's tasks.

    Args:
        context: the run.
        tasks: the round's training tasks, by device.
        current: the newest record of a task, which names its update once it is there.
        updates: where updates are kept.
    """
    plans = compiled_plans(context, tasks)

    def load(task: str) -> Contribution:
        record = current(task)
        if record.update_digest is None or record.metrics is None:
            raise RefusedError(RefusalReason.FAILED, f"task {task} of {record.device} has no update to fold")
        return Contribution(
            device=record.device,
            key=record.plan_key,
            plan=plans[record.plan_key],
            weights=open_tensors(updates.path(record.update_digest)),
            metrics=record.metrics,
        )

    return Folding(context.strategy, context.artifacts.layout, [task.id for task in tasks], load)


def first_version(context: RunContext, blobs: BlobStore) -> VersionRecord:
    """Put the initial weights into the store's blobs, and with them the heads that tiers have of their own.

    Raises:
        BlobError: a file of them is missing or damaged.
        ConfigError: they do not fit the architecture.
        StorageError: the disk is full.
    """
    weights = context.artifacts.initial_weights()
    heads = context.artifacts.initial_heads(item.tier for item in context.tiers)
    begin = context.strategy.begin
    state = begin(context.artifacts.layout, weights, heads) if begin is not None and heads else {}
    return VersionRecord(
        run=context.run,
        number=0,
        round=0,
        digest=blobs.put(encode_weights(weights, {"run": context.run, "version": "0"})),
        state_digest=blobs.put(encode_weights(state)) if state else None,
        statistics_digest=None,
        created_at=time.time(),
        evaluation=None,
    )


def make_version(
    context: RunContext, number: int, old: VersionRecord, folding: Folding, store: Store, blobs: BlobStore
) -> VersionRecord | None:
    """Finish a merge, step the server optimizer and commit the new global version.

    Args:
        context: the run.
        number: of the round.
        old: the version the round started from.
        folding: with every update folded.
        store: the version is committed here, with the tasks that are in it.
        blobs: its weights are kept here first.

    Returns:
        The new version, or None if it is not finite: then nothing was committed.

    Raises:
        BlobError: the old version cannot be read.
        StorageError: the disk is full.
    """
    before = open_tensors(blobs.path(old.digest))
    state = open_state(blobs, old.state_digest)
    weights, state_after = context.strategy.step(before, folding.finish(before), state)
    if not _finite(weights):
        return None
    metadata = {"run": context.run, "version": str(old.number + 1), "round": str(number)}
    digest = blobs.put(
        encode_weights({item.name: weights[item.name] for item in context.artifacts.layout.parameters}, metadata)
    )
    version = VersionRecord(
        run=context.run,
        number=old.number + 1,
        round=number,
        digest=digest,
        state_digest=blobs.put(encode_weights(state_after)) if state_after else None,
        statistics_digest=None,
        created_at=time.time(),
        evaluation=None,
    )
    store.add_version(version, folding.folded)
    return version


def _finite(weights: Mapping[str, NDArray[np.float32]]) -> bool:
    return all(bool(np.isfinite(value.min()) and np.isfinite(value.max())) for value in weights.values() if value.size)
