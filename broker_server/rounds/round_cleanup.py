"""Removes data that only a finished round needed: sent weights, updates, states and versions."""

from collections.abc import Sequence

from broker_server.rounds.best import drop_old_weights
from broker_server.rounds.dispatch import Services
from broker_server.rounds.round_records import sent_digests, training_tasks
from broker_server.rounds.run_context import RunContext
from broker_server.store import RoundRecord, Store, TaskRecord
from broker_server.store.promotion import promoted


def clean_up(
    context: RunContext, services: Services, record: RoundRecord, tasks: Sequence[TaskRecord]
) -> None:
    """Remove data that only a finished round needed; may be called repeatedly.

    Args:
        context: the run.
        services: services that hold blobs and updates.
        record: the newest round, which is closed or abandoned.
        tasks: its tasks. Tasks that a later round takes over keep their data.
    """
    waiting = training_tasks(context, services.store, record.number + 1)
    waiting_ids = {task.id for task in waiting}
    finished = []
    for task in tasks:
        if task.id not in waiting_ids:
            finished.append(task)
    waiting_weights = sent_digests(waiting)
    finished_weights = sent_digests(finished) - waiting_weights
    services.dispatcher.blobs.withdraw(finished_weights)
    unneeded = finished_weights | _old_states(services.store, record.run)
    used = services.store.used_blobs(unneeded)
    for digest in unneeded - used - waiting_weights:
        services.blobs.remove(digest)
    for task in finished:
        services.dispatcher.forget(task.id)
        if task.update_digest is not None:
            services.updates.remove(task.update_digest)
    if context.config.keep_versions is not None:
        _drop_old_versions(context, services, context.config.keep_versions, waiting_weights)


def _old_states(store: Store, run: str) -> set[str]:
    """Return the digest of the state before the newest one.

    A run continues with the newest state of the server optimizer only, and states may be large.
    """
    *before, newest = store.versions(run, last=2)
    states: set[str] = set()
    for version in before:
        if version.state_digest is not None:
            states.add(version.state_digest)
    # Both versions share a blob if a round has left the state unchanged.
    return states - {newest.state_digest}


def _drop_old_versions(
    context: RunContext, services: Services, newest: int, waiting_weights: set[str]
) -> None:
    run = context.run
    versions = services.store.versions(run)
    # Versions of other runs may have the same bytes.
    used = services.store.used_blobs({version.digest for version in versions}, beside=run)
    used |= waiting_weights
    promoted_version = promoted(services.store, run)
    if promoted_version is not None:
        used.add(promoted_version.digest)
    drop_old_weights(versions, newest, services.blobs, used, context.config.evaluation)
