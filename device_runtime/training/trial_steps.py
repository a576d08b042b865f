"""The steps of a trial on synthetic samples, and how far those of two providers differ.

A trial must fit into the memory of a training on the same board. So the results on the CPU go to
disk, and those of another provider are compared with them in place.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_runtime.training.backends.session import TrainSession
from device_runtime.training.epochs import made_up_steps
from device_runtime.training.hooks import Hooks
from device_runtime.training.stored_tensors import StoredTensors, Tensors
from fleet_protocol.manifest import Manifest

STEPS = 5
"""Steps of a trial. The first is not timed: a provider compiles and chooses kernels in it."""


@dataclass(frozen=True)
class TrialTask:
    """The steps that every provider takes in a trial.

    Attributes:
        manifest: manifest of the artifact set.
        batch: samples of a step.
        hooks: may stop it.
        folder: folder on a disk with space for parameters and states.
    """

    manifest: Manifest
    batch: int
    hooks: Hooks
    folder: Path


class ReferenceSteps:
    """The steps on the CPU.

    Attributes:
        seconds: seconds of the fastest step, excluding the first.
        losses: losses of the steps.
        states: optimizer states after the first step, when the weights of another provider still
            equal the CPU's to the last bits.
        has_states: whether there are any.
        parameters: parameters after the last step.
        state_change: Euclidean norm of the change of the states by all steps after the first.
        parameter_change: the same of the parameters.

    Raises:
        StorageError: the disk has no space for the tensors.
    """

    def __init__(self, session: TrainSession, task: TrialTask) -> None:
        self.states = StoredTensors(task.folder)
        self.parameters = StoredTensors(task.folder)
        self.seconds, self.losses = _take_steps(session, task, self._save)
        last_states = _numbers(session.states())
        self.has_states = bool(last_states)
        self.state_change = self.states.difference(last_states).distance
        last = _numbers(session.parameters())
        self.parameter_change = self.parameters.difference(last).distance
        self.parameters.save(last)

    def _save(self, session: TrainSession) -> None:
        """Store the tensors after the first step."""
        self.states.save(_numbers(session.states()))
        self.parameters.save(_numbers(session.parameters()))


class ComparedSteps:
    """The same steps on another provider.

    Attributes:
        seconds: seconds of the fastest step, excluding the first.
        same_bits: whether its results equal the CPU's to the last bit.
        deviations: Euclidean norms of the differences of losses, states and parameters.
    """

    def __init__(self, session: TrainSession, task: TrialTask, expected: ReferenceSteps) -> None:
        self._expected = expected
        self._states_off = 0.0
        self._states_equal = False
        self.seconds, losses = _take_steps(session, task, self._compare_states)
        parameters = expected.parameters.difference(_numbers(session.parameters()))
        self.same_bits = (
            np.array_equal(losses, expected.losses) and self._states_equal and parameters.is_equal
        )
        self.deviations = (
            float(np.linalg.norm(losses - expected.losses)),
            self._states_off,
            parameters.distance,
        )

    def _compare_states(self, session: TrainSession) -> None:
        states = self._expected.states.difference(_numbers(session.states()))
        self._states_equal = states.is_equal
        self._states_off = states.distance


def _take_steps(
    session: TrainSession,
    task: TrialTask,
    after_first: Callable[[TrainSession], None],
) -> tuple[float, NDArray[Any]]:
    """Take the steps; return the seconds of the fastest one after the first, and all losses.

    Args:
        session: the session.
        task: the steps.
        after_first: called with the session after the first step.
    """
    losses: list[float] = []
    seconds: list[float] = []
    began = time.perf_counter()
    for loss in islice(made_up_steps(session, task.manifest, task.batch), STEPS):
        seconds.append(time.perf_counter() - began)
        losses.append(loss)
        if len(losses) == 1:
            after_first(session)
        task.hooks.go_on()
        began = time.perf_counter()
    return min(seconds[1:]), np.array(losses)


def _numbers(tensors: Tensors) -> dict[str, NDArray[Any]]:
    """Return the tensors that come from gradients, without counters."""
    numbers = {}
    for name, value in tensors.items():
        if value.shape and value.dtype.kind == "f":
            numbers[name] = value
    return numbers
