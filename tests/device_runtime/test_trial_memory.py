"""A trial of providers needs little memory beside the training that it precedes."""

import tracemalloc

import numpy as np
import pytest

from device_runtime.training.hooks import Hooks
from device_runtime.training.trial_steps import ComparedSteps, ReferenceSteps, TrialTask
from fleet_protocol.manifest import ParameterSpec
from tests.device_runtime.tiny_set import write_tiny_set

COUNT = 16
SIZE = 100_000
MODEL_BYTES = 4 * COUNT * SIZE
"""Of the parameters; the states have as many."""


class LargeSession:
    """A session of many numbers, whose steps need no memory."""

    def __init__(self, rate: float = 0.5) -> None:
        self._rate = np.float32(rate)
        self._parameters = {f"p{i}": np.zeros(SIZE, np.float32) for i in range(COUNT)}
        self._states = {f"s{i}": np.zeros(SIZE, np.float32) for i in range(COUNT)}

    def reset(self):
        return self._parameters

    def anchor(self, mu):
        assert mu == 0

    def parameters(self):
        return self._parameters

    def states(self):
        return self._states

    def step(self, *_arguments):
        for value in (*self._parameters.values(), *self._states.values()):
            np.add(value, self._rate, out=value)
        return float(self._rate)


@pytest.fixture
def trial_task(tmp_path):
    specs = []
    for i in range(COUNT):
        spec = ParameterSpec(name=f"p{i}", shape=(SIZE,), axes=("a",), block="head", offset=0)
        specs.append(spec)
    tiny = write_tiny_set(tmp_path)
    manifest = tiny.manifest.model_copy(update={"parameters": tuple(specs)})
    return TrialTask(manifest, 4, Hooks(), tmp_path)


def test_a_trial_has_no_second_copy_of_the_model_in_memory(trial_task):
    """The CPU's parameters and states are on disk. Comparing reads them piece by piece."""
    first = LargeSession()
    second = LargeSession()
    tracemalloc.start()
    try:
        expected = ReferenceSteps(first, trial_task)
        _held, highest = tracemalloc.get_traced_memory()
        assert highest < 0.2 * MODEL_BYTES
        tracemalloc.reset_peak()
        compared = ComparedSteps(second, trial_task, expected)
        assert tracemalloc.get_traced_memory()[1] < 0.2 * MODEL_BYTES
    finally:
        tracemalloc.stop()
    assert compared.same_bits
    assert compared.deviations == (0.0, 0.0, 0.0)


def test_each_kind_of_result_is_compared(trial_task):
    """States after the first of five steps, losses of all, parameters after the last."""
    expected = ReferenceSteps(LargeSession(), trial_task)
    compared = ComparedSteps(LargeSession(0.25), trial_task, expected)
    assert not compared.same_bits
    root = (COUNT * SIZE) ** 0.5
    losses = 0.25 * 5**0.5
    assert compared.deviations == pytest.approx((losses, 0.25 * root, 5 * 0.25 * root), rel=1e-3)
    assert expected.state_change == pytest.approx(4 * 0.5 * root, rel=1e-3)
    assert expected.parameter_change == pytest.approx(4 * 0.5 * root, rel=1e-3)
