"""Runs tasks on files that other programs may change: a result counts only if the samples did not change meanwhile.

Before a task, changed files are read again; after it, the files are checked once more. If they changed meanwhile, the
task is repeated on the new samples, a few times.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from device_runtime.training.compute import Outcome
from device_runtime.training.hooks import Hooks, TaskStopped
from device_runtime.training.task import Bench, Task
from fleet_protocol.data import DataConfig, DataSet, load_data
from fleet_protocol.data.stamps import REPLACING, shown
from fleet_protocol.errors import ConfigError, DataChangedError, DataError

TRIES = 3
"""Most attempts at a task whose files change meanwhile."""

_T = TypeVar("_T")
Work = Callable[[Task, Bench, Hooks], _T]


@dataclass(frozen=True)
class DataSeen:
    """The result of a check: the board's current data, and the files that were read again because they had changed."""

    data: DataSet
    changed: str = ""


def on_current_data(work: Work[_T], task: Task, bench: Bench, hooks: Hooks) -> _T:
    """Run a task on samples that stay the same in their files from beginning to end.

    Raises:
        DataChangedError: the files changed during every attempt, or cannot be read now.
        Exception: any error of the work that changed files did not cause.
    """
    bench = _current(bench, hooks)
    for _ in range(TRIES):
        result: _T | None = None
        failure: Exception | None = None
        try:
            result = work(task, bench, hooks)
        except TaskStopped:
            raise
        except Exception as error:  # noqa: BLE001 - samples that change during a task may cause any error
            failure = error
        changes = bench.data.changes()
        if failure is not None and not changes:
            raise failure
        failure = None  # its frames hold the memory of the attempt
        try:
            after = _current(bench, hooks) if changes else bench
        except DataError:
            _discard(result, bench)
            raise
        if result is not None and (after is bench or after.data.equals(bench.data)):
            return result
        _discard(result, bench)
        bench = after
    raise DataChangedError(f"{shown(changes)} changed during each of {TRIES} attempts at this task; {REPLACING}")


def _current(bench: Bench, hooks: Hooks) -> Bench:
    """Return the board with the current samples of its files; call the hooks if they were read again."""
    stamps = bench.data.stamps
    if stamps is None:
        return bench
    later = stamps.again()
    changes = stamps.changes(later)
    seen = None
    if changes:
        seen = DataSeen(_read_again(stamps.config, changes), shown(changes))
    elif stamps.young:  # they have aged, so their timestamps are enough from now on
        seen = DataSeen(replace(bench.data, stamps=later))
    if seen is None:
        return bench
    hooks.report(seen)
    return replace(bench, data=seen.data)


def _read_again(config: DataConfig, changes: tuple[str, ...]) -> DataSet:
    try:
        return load_data(config)
    except DataChangedError:
        raise
    except (DataError, ConfigError) as error:
        raise DataChangedError(
            f"{shown(changes)} changed, and cannot be used now: {error}; the next task checks again"
        ) from error


def _discard(result: object, bench: Bench) -> None:
    """Remove the update of an attempt that does not count."""
    if isinstance(result, Outcome):
        bench.blobs.remove(result.update.digest)
