"""Tasks on files that others may change: what was computed counts only if the samples were the same all the time.

Before a task the files are read again where they have changed since; after it they are looked at once more. Where they
have changed meanwhile the task is done again on the new samples, a few times. What is read again has to fit the fleet's
contract as the samples of before did.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from device_runtime.training.agreed_data import AgreedData
from device_runtime.training.compute import Outcome
from device_runtime.training.hooks import Hooks, TaskStopped
from device_runtime.training.task import Bench, Task
from fleet_protocol.data import DataConfig, DataSet, load_data
from fleet_protocol.data.stamps import REPLACING, shown
from fleet_protocol.errors import ConfigError, DataChangedError, DataError

TRIES = 3
"""How often a task is done on files that change under it."""

_T = TypeVar("_T")
Work = Callable[[Task, Bench, Hooks], _T]


@dataclass(frozen=True)
class DataSeen:
    """The files were looked at: what the board has now, and which files were read again because they had changed."""

    data: AgreedData
    changed: str = ""


def on_current_data(work: Work[_T], task: Task, bench: Bench, data: AgreedData, hooks: Hooks) -> _T:
    """Do a task on the samples that the files hold, from its beginning to its end.

    Args:
        work: what is done.
        task: with what.
        bench: on what; whatever samples it has, `data` takes their place.
        data: the board's samples, as the task's contract wants them.
        hooks: are told of samples that were read again.

    Raises:
        MismatchError: they changed, and do not fit the contract as they are now.
        DataChangedError: they changed under every try, or cannot be read as they are now.
        Exception: whatever the work raises, where that has nothing to do with files that changed.
    """
    data = _current(data, hooks)
    for _ in range(TRIES):
        bench = replace(bench, data=data.samples)
        result: _T | None = None
        failure: Exception | None = None
        try:
            result = work(task, bench, hooks)
        except TaskStopped:
            raise
        except Exception as error:  # noqa: BLE001 - samples that change under a task may make anything of it
            failure = error
        changes = data.raw.changes()
        if failure is not None and not changes:
            raise failure
        failure = None  # its frames hold what the try had taken
        try:
            after = _current(data, hooks) if changes else data
        except DataError:
            _discard(result, bench)
            raise
        if result is not None and (after is data or after.samples.equals(data.samples)):
            return result
        _discard(result, bench)
        data = after
    raise DataChangedError(f"{shown(changes)} changed during each of {TRIES} tries of this task; {REPLACING}")


def _current(data: AgreedData, hooks: Hooks) -> AgreedData:
    """The samples of the board's files as they are now; the hooks are told where they were read again.

    Samples that do not fit are not told: the board keeps those it has, and the next task looks at the files again.
    """
    stamps = data.raw.stamps
    if stamps is None:
        return data
    later = stamps.again()
    changes = stamps.changes(later)
    seen = None
    if changes:
        seen = DataSeen(data.terms.apply(_read_again(stamps.config, changes)), shown(changes))
    elif stamps.young:  # they have aged, and their times tell enough from now on
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
            f"{shown(changes)} changed, and cannot be used as it is now: {error}; the next task looks again"
        ) from error


def _discard(result: object, bench: Bench) -> None:
    """Remove the update of a try that does not count."""
    if isinstance(result, Outcome):
        bench.blobs.remove(result.update.digest)
