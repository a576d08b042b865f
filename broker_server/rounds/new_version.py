"""From a round's updates on disk to a new global version in the store: which are merged, and how
each counts.

Updates are folded as they come (`broker_server.updates.folding`), though what they may be is
known at the close only: bounds are taken from all of them. Where one is not as it should be the
sums are made again without it.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker_server.rounds.collecting import OpenTask
from broker_server.rounds.dispatch import Services
from broker_server.rounds.planning import compiled_plans
from broker_server.rounds.run_context import RunContext
from broker_server.rounds.tier_models import open_model
from broker_server.store import Outcome, TaskPhase, TaskRecord, VersionRecord
from broker_server.strategies.private_merge import private_merge
from broker_server.strategies.strategy import Contribution
from broker_server.updates.bounds import PEERS, Measured, Verdict, screen
from broker_server.updates.distance import measure as measured_distance
from broker_server.updates.folding import Folding
from broker_server.updates.intake import MOST_SENT
from broker_server.updates.krum import left_out
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.encodings import open_weights
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.mapped_tensors import open_tensors
from fleet_protocol.noise import bounded
from fleet_protocol.weights import weights_parts
from models.tier import Tier

Tensors = Mapping[str, NDArray[Any]]
_BACK = 20  # rounds that are looked at for a tier's norms, whose only board may have been away


@dataclass(frozen=True)
class Counted:
    """What is merged."""

    folding: Folding  # of the updates that count
    outcomes: Mapping[str, Outcome]  # of every update, by task
    refusals: Mapping[str, tuple[RefusalReason, str]]  # why updates were refused, by task


def count_updates(
    context: RunContext,
    services: Services,
    folding: Folding,
    old: VersionRecord,
    sent: Callable[[str], Tensors],
) -> Counted:
    """Judge updates that were folded by what was sent, and fold them again if not all of them count
    as they are.

    Raises:
        BlobError: an update on disk can no longer be read.
    """
    config = context.config.robust
    privacy = context.config.privacy
    tiers = Counter(item.tier for item in folding.measured.values())
    earlier, devices = _earlier(services, old, tiers)
    if (
        len(devices | {item.device for item in folding.measured.values()}) < PEERS
    ):  # which of two is unlike the other?
        config = config.model_copy(update={"norm_bound": 0.0})
    verdicts = screen(folding.measured, earlier, config)
    chosen_out = _left_out(folding, verdicts, config.faulty) if config.merge == "krum" else ()
    outcomes = {
        task: _outcome(item, left_out=task in chosen_out) for task, item in verdicts.items()
    }
    changed = any(_changes(outcomes[task]) for task in folding.folded)

    def treated(task: str, update: Contribution) -> Contribution | None:
        if outcomes[task].phase is not TaskPhase.MERGED:
            return None
        screening = verdicts[task].screening
        if screening.scale < 1:
            update = replace(update, weights=_scaled(update.weights, sent(task), screening.scale))
        if screening.samples < screening.declared:
            update = replace(
                update,
                metrics=update.metrics.model_copy(update={"examples": screening.samples}),
            )
        return update

    if changed:
        folding = folding.again(treated)
    if privacy is not None and privacy.where == "central":  # by the merge itself; noted here
        outcomes = {task: _clipped(item, privacy.clip) for task, item in outcomes.items()}
    refusals = {
        task: (item.reason, item.detail)
        for task, item in verdicts.items()
        if item.reason is not None
    }
    return Counted(folding, outcomes, refusals)


def report_refusals(services: Services, counted: Counted, tasks: Mapping[str, TaskRecord]) -> None:
    """Name those whose updates were refused, and count them."""
    for task, (reason, detail) in counted.refusals.items():
        record = tasks[task]
        services.dispatcher.reporter.refused(
            reason, detail, device=record.device, number=record.round
        )


def _earlier(
    services: Services, old: VersionRecord, tiers: Mapping[str, int]
) -> tuple[dict[str, list[float]], set[str]]:
    """Norms that the version the round started from was made of, by tier, those before where that
    is too few; whose.
    """
    found = dict[str, list[float]]()
    devices = set[str]()
    back = (
        _BACK if sum(tiers.values()) > 1 else 1
    )  # whoever is alone in the fleet has only itself to differ from
    for number in range(old.round, max(old.round - back, 0), -1):
        for task in services.store.tasks(old.run, number, "train"):
            if task.phase is TaskPhase.MERGED and task.screening is not None:
                found.setdefault(task.tier, []).append(task.screening.norm * task.screening.scale)
                devices.add(task.device)
        if all(count + len(found.get(tier, ())) >= PEERS for tier, count in tiers.items()):
            break
    return found, devices


def _left_out(folding: Folding, verdicts: Mapping[str, Verdict], faulty: float) -> tuple[str, ...]:
    by_plan: dict[str, dict[str, Tensors]] = {}
    for task in folding.folded:
        if verdicts[task].reason is None:
            update = folding.load(task)
            by_plan.setdefault(update.key, {})[task] = update.weights
    return tuple(task for updates in by_plan.values() for task in left_out(updates, faulty))


def _outcome(verdict: Verdict, *, left_out: bool) -> Outcome:
    if verdict.reason is not None:
        return Outcome(
            TaskPhase.REFUSED,
            verdict.screening,
            f"{verdict.reason.value}: {verdict.detail}",
        )
    if left_out:
        return Outcome(
            TaskPhase.LEFT_OUT,
            verdict.screening,
            "krum: farther from the others of its tier than they are",
        )
    return Outcome(TaskPhase.MERGED, verdict.screening)


def _changes(outcome: Outcome) -> bool:
    screening = outcome.screening
    return (
        outcome.phase is not TaskPhase.MERGED
        or screening.scale < 1
        or screening.samples < screening.declared
    )


def _clipped(outcome: Outcome, clip: float) -> Outcome:
    noted = {"bound": clip, "scale": min(1.0, clip / max(outcome.screening.norm, clip))}
    return replace(outcome, screening=outcome.screening.model_copy(update=noted))


def _scaled(update: Tensors, sent: Tensors, scale: float) -> dict[str, NDArray[np.float32]]:
    """An update moved towards what was sent, in float64: the difference of large floats may be no
    float32.
    """
    return {
        name: (sent[name] + scale * (value.astype(np.float64) - sent[name])).astype(np.float32)
        for name, value in update.items()
    }


def begin_folding(
    context: RunContext,
    opened: Mapping[str, OpenTask],
    services: Services,
    old: VersionRecord,
) -> Folding:
    """An empty merge of a round's tasks, by id in the order of their devices, from a version.

    They may still change.
    """
    tasks = [task.record for task in opened.values()]
    plans = compiled_plans(context, tasks)
    privacy = context.config.privacy
    if privacy is not None and privacy.where == "local":
        privacy = None

    def load(task: str) -> Contribution:
        record = opened[task].record
        if record.update_digest is None or record.metrics is None:
            raise RefusedError(
                RefusalReason.FAILED,
                f"task {task} of {record.device} has no update to fold",
            )
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
        norm, values = opened[task].distance or measured_distance(
            update.weights, sent(record.weights.digest)
        )
        announced = services.dispatcher.fleet.announced_examples(update.device)
        return Measured(
            record.tier, norm, values, update.metrics.examples, announced, update.device
        )

    def moved(task: str, update: Contribution) -> Contribution:
        record = opened[task].record
        if privacy is not None:
            return replace(
                update,
                weights=bounded(update.weights, sent_to(services, record), privacy.clip),
            )
        weight = _weight_of(context, record, old)
        current_version = record.version == old.number
        if current_version and context.config.download.encoding == "fp32":
            return update
        now = update.plan.slice(open_tensors(services.blobs.path(old.digest)))
        sent = sent_to(services, record)
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
        merge = private_merge(
            context.artifacts.layout,
            asked,
            deviation,
            context.config.server_optimizer,
            draw,
        )
    return Folding(merge, list(opened), load, measure, moved)


def _weight_of(context: RunContext, task: TaskRecord, old: VersionRecord) -> float:
    """What the difference of an update counts, by how many versions have been made since its device
    was asked.

    John Nguyen et al., AISTATS 2022, "Federated Learning with Buffered Asynchronous Aggregation",
    https://arxiv.org/abs/2106.06639, where the exponent is 1/2.
    """
    return float((1 + old.number - task.version) ** -context.config.round.staleness)


def sent_to(services: Services, task: TaskRecord) -> Mapping[str, NDArray[Any]]:
    """The weights that a task's device was sent."""
    return open_weights(services.blobs.path(task.weights.digest))


def first_version(context: RunContext, blobs: BlobStore) -> VersionRecord:
    """Put the initial weights into the store's blobs, and with them the heads that tiers have of
    their own.

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
    context: RunContext,
    services: Services,
    tasks: Mapping[str, TaskRecord],
    old: VersionRecord,
    folding: Folding,
) -> VersionRecord | str:
    """Finish a merge and commit the new global version with what became of the updates.

    Or say why there is none.

    Raises:
        BlobError: the old version cannot be read.
        StorageError: the disk is full.
    """
    blobs = services.blobs
    last = services.store.last_round(context.run)
    number = last.number if last is not None else 0
    counted = count_updates(
        context, services, folding, old, lambda task: sent_to(services, tasks[task])
    )
    report_refusals(services, counted, tasks)
    new = counted.folding.finish(open_model(blobs, old)) if counted.folding.folded else None
    values = [value for value in new.weights.values() if value.size] if new is not None else []
    if new is None or not all(
        np.isfinite(value.min()) and np.isfinite(value.max()) for value in values
    ):
        services.store.settle_outcomes({task: counted.outcomes[task] for task in counted.refusals})
        return "every update was refused" if new is None else _blame(counted, tasks)
    # Tensors alone: where the model is whole, this blob is what its devices are sent, for
    # statistics and then to train.
    digest = blobs.put(
        *weights_parts(
            {item.name: new.weights[item.name] for item in context.artifacts.layout.parameters}
        )
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
    norms = {
        tasks[task].device: counted.outcomes[task].screening.norm for task in counted.folding.folded
    }
    worst = max(norms, key=norms.__getitem__)
    return f"the merged weights are not finite; the largest update is that of {worst}, of norm {norms[worst]:.4g}"
