"""Turns a round's updates into a new global version in the store.

The sums begin when the round opens, and end when it closes; `broker_server.updates` processes each
update in between.
"""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from broker_server.rounds.collecting import OpenTask
from broker_server.rounds.dispatch import Services
from broker_server.rounds.planning import compiled_plans
from broker_server.rounds.run_context import RunContext
from broker_server.rounds.tier_models import open_model
from broker_server.stages.moves import BaseVersion, moves_to
from broker_server.stages.update import Tensors, Update
from broker_server.store import Outcome, TaskRecord, VersionRecord
from broker_server.store.update_store import StoredTensors
from broker_server.strategies.strategy import GlobalModel
from broker_server.strategies.traits import Trait
from broker_server.updates.combine import SelectedDevices, choose_merge
from broker_server.updates.folding import Folding
from broker_server.updates.intake import MOST_SENT
from broker_server.updates.screens import ScreenedUpdates, expect_changes, screen_round
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.encodings import open_weights
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.mapped_tensors import open_tensors
from fleet_protocol.weights import weights_parts
from models.tier import Tier


def begin_folding(
    context: RunContext,
    opened: Mapping[str, OpenTask],
    services: Services,
    old: VersionRecord,
) -> Folding:
    """Begin to merge the updates of a round.

    Args:
        context: the run.
        opened: the round's tasks by id, in the order of their devices. They may still change.
        services: services that hold the updates.
        old: the version from which the round starts.
    """
    tasks = [task.record for task in opened.values()]
    plans = compiled_plans(context, tasks)

    # Devices that share a plan share the weights that were sent to them, so those are opened once.
    @lru_cache(MOST_SENT)
    def sent(digest: str) -> Tensors:
        return open_weights(services.blobs.path(digest))

    # The devices of a secure sum share one update, their mean: it is read once for those in a row.
    @lru_cache(1)
    def stored(digest: str) -> Tensors:
        return StoredTensors(services.updates, digest)

    def load(task: str) -> Update:
        record = opened[task].record
        if record.update_digest is None or record.metrics is None:
            raise RefusedError(
                RefusalReason.FAILED,
                f"task {task} of {record.device} has no update to fold",
            )
        return Update(
            device=record.device,
            tier=Tier.parse(record.tier),
            key=record.plan_key,
            plan=plans[record.version, record.plan_key],
            weights=stored(record.update_digest),
            metrics=record.metrics,
            version=record.version,
            sent=partial(sent, record.weights.digest),
            distance=opened[task].distance,
            announced=services.dispatcher.fleet.announced_examples(record.device),
        )

    base = _base(context, services.blobs, old)
    asked = []
    for task in tasks:
        plan = plans[task.version, task.plan_key]
        asked.append((task.plan_key, plan))
    merge = choose_merge(
        context.strategy.merge,
        base.noise,
        SelectedDevices(context.artifacts.layout, asked),
        context.config.server_optimizer,
        draw=lambda: context.noise(f"{context.config.seed}/merge/{old.number}"),
    )
    tiers = Counter(task.tier for task in tasks)
    is_doubtful = expect_changes(services.store, old, context.config.robust, tiers)
    moves = moves_to(base, (task.version for task in tasks))
    return Folding(merge, list(opened), load, moves, is_doubtful)


def _base(context: RunContext, blobs: BlobStore, old: VersionRecord) -> BaseVersion:
    return BaseVersion(
        number=old.number,
        weights=lambda: open_tensors(blobs.path(old.digest)),
        staleness=context.config.round.staleness,
        rounded=context.config.download.encoding != "fp32",
        noise=context.config.central_noise,
    )


def first_version(context: RunContext, blobs: BlobStore) -> VersionRecord:
    """Store the initial weights, and the separate heads of tiers that have them.

    Raises:
        BlobError: a file of them is missing or damaged.
        ConfigError: they do not fit the architecture.
        StorageError: the disk is full.
    """
    weights = context.artifacts.initial_weights()
    heads = context.artifacts.initial_heads(tier_set.tier for tier_set in context.tiers)
    begin = context.strategy.begin
    state = begin(weights, heads) if begin is not None and heads else {}
    return _version(context, blobs, GlobalModel(weights, state), number=0, round_number=0)


@dataclass(frozen=True)
class NoVersion:
    """The updates of a round made no version."""

    reason: str


def make_version(
    context: RunContext,
    services: Services,
    tasks: Mapping[str, TaskRecord],
    old: VersionRecord,
    folding: Folding,
) -> VersionRecord | NoVersion:
    """Finish a merge and commit the new global version with the outcome of each update.

    Args:
        context: the run.
        services: services that hold versions and updates.
        tasks: tasks of the round, by id.
        old: the version from which the round started.
        folding: all updates of the round.

    Returns: The new version, or the reason why none was made.

    Raises:
        BlobError: the old version or an update cannot be read.
        StorageError: the disk is full.
    """
    # Screens come before anything is finished: an update that does not count must not be in the
    # sums.
    base = _base(context, services.blobs, old)
    screened = screen_round(folding, services.store, old, context.config.robust, base.noise)
    _report_refusals(services, screened, tasks)
    new = None
    if screened.folding.folded:
        new = screened.folding.finish(open_model(services.blobs, old))
    if new is None or not _is_finite(new):
        # Only what was refused is settled: the other updates are not at fault.
        refused = {task: screened.outcomes[task] for task in screened.refusals}
        services.store.settle_outcomes(refused)
        if new is None:
            return NoVersion("every update was refused")
        return NoVersion(_blame(screened, tasks))
    last = services.store.last_round(context.run)
    number = last.number if last is not None else 0
    # Only parameters: if the model is whole, its devices are sent this blob, first for statistics
    # and then for training.
    parameters = context.artifacts.layout.parameters
    weights = {spec.name: new.weights[spec.name] for spec in parameters}
    model = GlobalModel(weights, new.state)
    # The blobs are on disk before the row that names them is committed, so a killed server finds
    # both or neither.
    version = _version(context, services.blobs, model, number=old.number + 1, round_number=number)
    outcomes = dict(screened.outcomes)
    if not context.keeps(Trait.ONE_VERSION):
        for task, outcome in screened.outcomes.items():
            weight = base.weight_of(tasks[task].version)
            outcomes[task] = _noting_staleness(outcome, number, weight)
    # One transaction for both: a version without outcomes would merge its updates a second time.
    services.store.add_version(version, outcomes)
    return version


def _version(
    context: RunContext, blobs: BlobStore, model: GlobalModel, *, number: int, round_number: int
) -> VersionRecord:
    return VersionRecord(
        run=context.run,
        number=number,
        round=round_number,
        digest=blobs.put(*weights_parts(model.weights)),
        state_digest=blobs.put(*weights_parts(model.state)) if model.state else None,
        statistics_digest=None,
        created_at=time.time(),
        evaluation=None,
    )


def _report_refusals(
    services: Services, screened: ScreenedUpdates, tasks: Mapping[str, TaskRecord]
) -> None:
    """Report the devices whose updates were refused, and count them."""
    for task, (reason, detail) in screened.refusals.items():
        record = tasks[task]
        services.dispatcher.reporter.refused(
            reason, detail, device=record.device, number=record.round
        )


def _is_finite(model: GlobalModel) -> bool:
    for value in model.weights.values():
        if not value.size:
            continue
        # The extremes are enough, without an array of flags as large as the model.
        if not (np.isfinite(value.min()) and np.isfinite(value.max())):
            return False
    return True


def _noting_staleness(outcome: Outcome, number: int, weight: float) -> Outcome:
    counts = {"round": number, "weight": weight}
    return replace(outcome, screening=outcome.screening.model_copy(update=counts))


def _blame(screened: ScreenedUpdates, tasks: Mapping[str, TaskRecord]) -> str:
    # Each update was finite by itself, so only their sum overflowed; the largest is the likeliest
    # cause.
    norms: dict[str, float] = {}
    for task in screened.folding.folded:
        norms[tasks[task].device] = screened.outcomes[task].screening.norm
    worst = max(norms, key=norms.__getitem__)
    return (
        f"the merged weights are not finite; the largest update is from {worst}, with norm "
        f"{norms[worst]:.4g}"
    )
