"""Runs one task, from weights on disk to an update on disk."""

import time
from dataclasses import replace

import numpy as np

from device_runtime.training.hooks import Hooks
from device_runtime.training.routines import routine_of
from device_runtime.training.task import DeviceSetup, Task
from device_runtime.training.update import FinishedUpdate, finish

_TIMED_STEPS = 5


def compute(task: Task, setup: DeviceSetup, hooks: Hooks) -> FinishedUpdate:
    """Run a task and save its update.

    Raises:
        TaskStopped: a hook requested it.
        DataError: the data does not fit the model.
        RefusedError: a self-test failed, or a loss, parameter or statistic is not finite, or the
            board lacks what the routine needs.
        ConfigError: a file that the operator put on the board is missing or damaged.
        BlobError: a blob is damaged on disk.
        StorageError: the update cannot be written.
    """
    result = routine_of(task.instructions).run(task, setup, hooks)
    return finish(task, setup, result)


def time_step(task: Task, setup: DeviceSetup, hooks: Hooks) -> float:
    """Return the current seconds per training step: the median of a few, whose results are dropped.

    Raises the errors of `compute`.
    """
    settings = {"steps": _TIMED_STEPS, "optimizer_state": "reset"}
    few_steps = task.instructions.train.model_copy(update=settings)
    # A routine's private values change the result of training, but not the cost of a step.
    instructions = task.instructions.model_copy(update={"train": few_steps, "settings": {}})
    began: list[float] = []

    def note_step() -> bool:  # called before every step
        began.append(time.monotonic())
        return hooks.stopped()

    training, _held_out = setup.split()
    nothing_held_out = (training, np.zeros(0, np.int64))
    routine_of(instructions).run(
        replace(task, instructions=instructions),
        replace(setup, parts=nothing_held_out, keeps_files=False),
        Hooks(hooks.report, note_step),
    )
    # Only of the last steps: the first ones warm the session up.
    return float(np.median(np.diff(began[-_TIMED_STEPS:])))
