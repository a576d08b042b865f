"""Reads from the store the version from which a round starts, and its tasks."""

from collections.abc import Iterable

from broker_server.rounds.run_context import RunContext
from broker_server.store import Store, TaskRecord, VersionRecord
from broker_server.store.machine import RoundState
from broker_server.strategies.traits import Trait
from fleet_protocol.errors import StorageError


def read_version(context: RunContext, store: Store, number: int | None = None) -> VersionRecord:
    """Return a version of a run, by default the newest.

    Raises:
        StorageError: the store does not have it.
    """
    version = store.version(context.run, number)
    if version is None:
        name = "no global version" if number is None else f"no global version {number}"
        raise StorageError(f"run {context.run} has {name} in the store")
    return version


def training_tasks(context: RunContext, store: Store, number: int) -> list[TaskRecord]:
    """Return the training tasks of a round, by device: its own, and those of earlier rounds.

    Only a round with a buffer takes over tasks of earlier rounds.
    """
    tasks = list(store.tasks(context.run, number, "train"))
    if not context.keeps(Trait.ONE_VERSION):
        tasks += store.late_tasks(context.run, number, waiting=True)
    return sorted(tasks, key=lambda task: task.device)


def are_retries_used_up(context: RunContext, store: Store) -> bool:
    """Return whether too many rounds in a row were abandoned to try another one."""
    retries = context.config.round.retries
    newest = store.rounds(context.run, last=retries)
    states = [record.state for record in newest]
    # Only if all of the newest rounds were abandoned is the number reached.
    return states.count(RoundState.ABANDONED) == retries


def sent_digests(tasks: Iterable[TaskRecord]) -> set[str]:
    """Return the digests of the weights that tasks offer to devices."""
    digests: set[str] = set()
    for task in tasks:
        for choice in task.choices:
            digests.add(choice.weights.digest)
    return digests
