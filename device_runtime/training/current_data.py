"""Runs tasks on files that other programs may change.

A result counts only if the samples did not change meanwhile.

Before a task, changed files are read again; after it, the files are checked once more. If they
changed meanwhile, the task is repeated on the new samples, a few times. New samples must fit the
fleet's contract, as the earlier ones did.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from device_runtime.training.agreed_data import AgreedData
from device_runtime.training.hooks import Hooks, TaskStopped
from device_runtime.training.task import DeviceSetup, Task
from device_runtime.training.update import FinishedUpdate
from fleet_protocol.data import DataConfig, DataSet, load_data
from fleet_protocol.data.stamps import REPLACING, list_paths
from fleet_protocol.errors import ConfigError, DataChangedError, DataError

TRIES = 3
"""Most attempts at a task whose files change meanwhile."""

_T = TypeVar("_T")
Work = Callable[[Task, DeviceSetup, Hooks], _T]


@dataclass(frozen=True)
class DataSeen:
    """The result of a check.

    Attributes:
        data: the board's current samples.
        changed: the files that were read again because they had changed; empty if none had.
    """

    data: AgreedData
    changed: str = ""


def on_current_data(
    work: Work[_T],
    task: Task,
    setup: DeviceSetup,
    data: AgreedData,
    hooks: Hooks,
) -> _T:
    """Run a task on samples whose files stay the same from beginning to end.

    Args:
        work: the function that runs the task.
        task: its first argument.
        setup: its second argument; `data` replaces its samples.
        data: the board's samples in the form of the task's contract.
        hooks: are called when samples were read again.

    Raises:
        MismatchError: the files changed, and their new samples do not fit the contract.
        DataChangedError: the files changed during every attempt, or cannot be read now.
        Exception: any error of the work that changed files did not cause.
    """
    # Files may have changed since the offer was accepted.
    data = _current(data, hooks)
    for _ in range(TRIES):
        setup = replace(setup, data=data.samples)
        result: _T | None = None
        failure: Exception | None = None
        try:
            result = work(task, setup, hooks)
        except TaskStopped:
            raise
        # Samples that change during a task may cause any error.
        except Exception as error:  # noqa: BLE001
            failure = error
        changes = data.raw.changes()
        if failure is not None and not changes:
            raise failure
        failure = None  # its frames hold the memory of the attempt
        try:
            after = _current(data, hooks) if changes else data
        except DataError:
            _discard(result, setup)
            raise
        if result is not None and (after is data or after.samples.equals(data.samples)):
            return result
        _discard(result, setup)
        data = after
    raise DataChangedError(
        f"{list_paths(changes)} changed during each of {TRIES} attempts at this task; {REPLACING}"
    )


def _current(data: AgreedData, hooks: Hooks) -> AgreedData:
    """Return the current samples of the board's files; call the hooks if they were read again.

    The hooks are not called for samples that do not fit: the board keeps its samples, and the next
    task checks again.
    """
    stamps = data.raw.stamps
    if stamps is None:
        return data
    later = stamps.current()
    changes = stamps.changes(later)
    seen = None
    if changes:
        seen = DataSeen(data.terms.apply(_read_again(stamps.config, changes)), list_paths(changes))
    elif stamps.young:  # The files are old enough by now for their timestamps to be enough.
        seen = DataSeen(data.stamped(later))
    if seen is None:
        return data
    hooks.report(seen)
    return seen.data


def _read_again(config: DataConfig, changes: tuple[str, ...]) -> DataSet:
    try:
        return load_data(config)
    except DataChangedError:
        raise
    except (DataError, ConfigError) as error:
        raise DataChangedError(
            f"{list_paths(changes)} changed, and cannot be used now: {error}; the next task "
            "checks again"
        ) from error


def _discard(result: object, setup: DeviceSetup) -> None:
    """Delete the update of an attempt that does not count."""
    if isinstance(result, FinishedUpdate):
        setup.blobs.remove(result.update.digest)
