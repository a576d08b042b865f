"""The steps of a trial on synthetic samples, and how far those of two providers differ.

A trial must fit into the memory of a training on the same board. So only the results on the CPU are
copied, once; those of another provider are compared in place.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_runtime.training.backends.session import TrainSession
from device_runtime.training.epochs import made_up_steps
from device_runtime.training.hooks import Hooks
from fleet_protocol.manifest import Manifest

STEPS = 5
"""Steps of a trial. The first is not timed: a provider compiles and chooses kernels in it."""

Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class TrialTask:
    """The steps that every provider takes in a trial.

    Attributes:
        manifest: manifest of the artifact set.
        batch: samples of a step.
        hooks: may stop it.
    """

    manifest: Manifest
    batch: int
    hooks: Hooks


class ReferenceSteps:
    """The steps on the CPU.

    Attributes:
        seconds: seconds of the fastest step, excluding the first.
        losses: losses of the steps.
        states: optimizer states after the first step, when the weights of another provider still
            equal the CPU's to the last bits.
        parameters: parameters after the last step.
        state_change: Euclidean norm of the change of the states by all steps after the first.
        parameter_change: the same of the parameters.
    """

    def __init__(self, session: TrainSession, task: TrialTask) -> None:
        self.states: dict[str, NDArray[Any]] = {}
        self.parameters: dict[str, NDArray[Any]] = {}
        self.seconds, self.losses = _take_steps(session, task, self._copy)
        self.state_change = distance(_numbers(session.states()), self.states)
        last = _numbers(session.parameters())
        self.parameter_change = distance(last, self.parameters)
        # In place, so that no second copy of the model is in memory.
        for name, value in last.items():
            np.copyto(self.parameters[name], value)

    def _copy(self, session: TrainSession) -> None:
        """Copy the tensors after the first step."""
        for name, value in _numbers(session.states()).items():
            self.states[name] = value.copy()
        for name, value in _numbers(session.parameters()).items():
            self.parameters[name] = value.copy()


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
        last = _numbers(session.parameters())
        self.same_bits = (
            np.array_equal(losses, expected.losses)
            and self._states_equal
            and _equal(last, expected.parameters)
        )
        self.deviations = (
            float(np.linalg.norm(losses - expected.losses)),
            self._states_off,
            distance(last, expected.parameters),
        )

    def _compare_states(self, session: TrainSession) -> None:
        states = _numbers(session.states())
        self._states_equal = _equal(states, self._expected.states)
        self._states_off = distance(states, self._expected.states)


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


def distance(tensors: Tensors, others: Tensors) -> float:
    """Return the Euclidean norm of the difference of two sets of tensors; NaN if one has a NaN."""
    total = 0.0
    for name, value in tensors.items():
        total += float(np.linalg.norm(value - others[name])) ** 2
    return math.sqrt(total)


def _equal(tensors: Tensors, others: Tensors) -> bool:
    return all(np.array_equal(value, others[name]) for name, value in tensors.items())
