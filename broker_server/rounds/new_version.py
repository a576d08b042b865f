"""From a round's updates on disk to a new global version in the store."""

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker_server.rounds.collecting import OpenTask
from broker_server.rounds.counting import Counted, count_updates, report_refusals
from broker_server.rounds.decoding import MOST_SENT
from broker_server.rounds.dispatch import Services
from broker_server.rounds.fold_order import Folding
from broker_server.rounds.planning import compiled_plans
from broker_server.rounds.run_context import RunContext
from broker_server.rounds.screening import Measured, difference
from broker_server.rounds.tier_models import open_model
from broker_server.store import TaskRecord, VersionRecord
from broker_server.strategies.private_merge import private_merge
from broker_server.strategies.strategy import Contribution
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.encodings import open_weights
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.mapped_tensors import open_tensors
from fleet_protocol.noise import bounded
from fleet_protocol.weights import weights_parts
from models.tier import Tier


def begin_folding(
    context: RunContext, opened: Mapping[str, OpenTask], services: Services, old: VersionRecord
) -> Folding:
    """An empty merge of a round's tasks, by id in the order of their devices, from a version; they may still change."""
    tasks = [task.record for task in opened.values()]
    plans = compiled_plans(context, tasks)
    privacy = context.config.privacy
    if privacy is not None and privacy.where == "local":
        privacy = None

    def load(task: str) -> Contribution:
        record = opened[task].record
        if record.update_digest is None or record.metrics is None:
            raise RefusedError(RefusalReason.FAILED, f"task {task} of {record.device} has no update to fold")
        return Contribution(
            device=record.device,
            tier=Tier.parse(record.tier),
            key=record.plan_key,
            plan=plans[record.version, record.plan_key],
            weights=services.updates.tensors(record.update_digest),
            metrics=record.metrics,
        )

    sent = lru_cache(MOST_SENT)(lambda digest: open_weights(services.blobs.path(digest)))

    def measure(task: str, update: Contribution) -> Measured:
        record = opened[task].record
        norm, values = opened[task].norm or difference(update.weights, sent(record.weights.digest))
        announced = services.dispatcher.fleet.announced(update.device)
        return Measured(record.tier, norm, values, update.metrics.examples, announced, update.device)

    def moved(task: str, update: Contribution) -> Contribution:
        record = opened[task].record
        if privacy is not None:
            return replace(update, weights=bounded(update.weights, sent_to(services, record), privacy.clip))
        weight = _weight_of(context, record, old)
        current_version = record.version == old.number
        if current_version and context.config.download.encoding == "fp32":
            return update
        now, sent = update.plan.slice(open_tensors(services.blobs.path(old.digest))), sent_to(services, record)
        weights = {
            name: (now[name] + weight * (value.astype(np.float64) - sent[name])).astype(np.float32)
            for name, value in update.weights.items()
        }
        key = update.key if current_version else f"{update.key}@{record.version}"
        return replace(update, key=key, weights=weights)

    merge = context.strategy.merge
    if privacy is not None:
        asked = ((task.plan_key, plans[task.version, task.plan_key]) for task in tasks)
        draw = context.noise(f"{context.config.seed}/merge/{old.number}")
        deviation = privacy.clip * privacy.noise_multiplier
        merge = private_merge(context.artifacts.layout, asked, deviation, context.config.server_optimizer, draw)
    return Folding(merge, list(opened), load, measure, moved)


def _weight_of(context: RunContext, task: TaskRecord, old: VersionRecord) -> float:
    """What the difference of an update counts, by how many versions have been made since its device was asked.

    John Nguyen et al., AISTATS 2022, "Federated Learning with Buffered Asynchronous Aggregation",
    https://arxiv.org/abs/2106.06639, where the exponent is 1/2.
    """
    return float((1 + old.number - task.version) ** -context.config.round.staleness)


def sent_to(services: Services, task: TaskRecord) -> Mapping[str, NDArray[Any]]:
    """The weights that a task's device was sent."""
    return open_weights(services.blobs.path(task.weights.digest))


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
    state = begin(weights, heads) if begin is not None and heads else {}
    return VersionRecord(
        run=context.run,
        number=0,
        round=0,
        digest=blobs.put(*weights_parts(weights)),
        state_digest=blobs.put(*weights_parts(state)) if state else None,
        statistics_digest=None,
        created_at=time.time(),
        evaluation=None,
    )


def make_version(
    context: RunContext, services: Services, tasks: Mapping[str, TaskRecord], old: VersionRecord, folding: Folding
) -> VersionRecord | str:
    """Finish a merge and commit the new global version with what became of the updates; or say why there is none.

    Raises:
        BlobError: the old version cannot be read.
        StorageError: the disk is full.
    """
    blobs = services.blobs
    last = services.store.last_round(context.run)
    number = last.number if last is not None else 0
    counted = count_updates(context, services, folding, old, lambda task: sent_to(services, tasks[task]))
    report_refusals(services, counted, tasks)
    new = counted.folding.finish(open_model(blobs, old)) if counted.folding.folded else None
    values = [value for value in new.weights.values() if value.size] if new is not None else []
    if new is None or not all(np.isfinite(value.min()) and np.isfinite(value.max()) for value in values):
        services.store.settle_outcomes({task: counted.outcomes[task] for task in counted.refusals})
        return "every update was refused" if new is None else _blame(counted, tasks)
    # Tensors alone: where the model is whole, this blob is what its devices are sent, for statistics and then to train.
    digest = blobs.put(
        *weights_parts({item.name: new.weights[item.name] for item in context.artifacts.layout.parameters})
    )
    version = VersionRecord(
        run=context.run,
        number=old.number + 1,
        round=number,
        digest=digest,
        state_digest=blobs.put(*weights_parts(new.state)) if new.state else None,
        statistics_digest=None,
        created_at=time.time(),
        evaluation=None,
    )
    outcomes = dict(counted.outcomes)
    for task, item in outcomes.items() if context.config.round.buffer is not None else ():
        counts = {"round": number, "weight": _weight_of(context, tasks[task], old)}
        outcomes[task] = replace(item, screening=item.screening.model_copy(update=counts))
    services.store.add_version(version, outcomes)
    return version


def _blame(counted: Counted, tasks: Mapping[str, TaskRecord]) -> str:
    norms = {tasks[task].device: counted.outcomes[task].screening.norm for task in counted.folding.folded}
    worst = max(norms, key=norms.__getitem__)
    return f"the merged weights are not finite; the largest update is that of {worst}, of norm {norms[worst]:.4g}"
