"""The synthetic weights of a trial keep rounding errors small, so that a provider which only rounds
in another way is not refused.
"""

from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import pytest

from benchmarks.step_time import CASES, Subjects
from device_runtime.training.accelerators import LIMIT
from device_runtime.training.backends.session import TrainSession
from device_runtime.training.epochs import made_up_steps

SAMPLES = 4
STEPS = 5
WIDTH = 0.25
ROUNDING = np.float32(1 + 3e-7)


@dataclass
class RoundedSession:
    """A session whose samples have other last bits."""

    session: TrainSession

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def step(self, x, *arguments):
        return self.session.step(x * ROUNDING, *arguments)


@pytest.mark.slow
def test_other_last_bits_of_the_samples_change_few_digits_of_a_deep_network(tmp_path):
    """MobileNetV2 has 52 batch norms, each of which may enlarge a rounding error."""
    case = next(case for case in CASES if case.arch == "mobilenet_v2")
    manifest = Subjects(replace(case, width=WIDTH), tmp_path).manifest

    def trained(wrap):
        """Return all parameters in a row, after the first step and after the last."""
        session = TrainSession(manifest, tmp_path / manifest.graphs["onnx/train"].path)
        losses = made_up_steps(wrap(session), manifest, SAMPLES)
        next(losses)
        first = as_one_row(session)
        for _ in islice(losses, STEPS - 1):
            pass
        return first, as_one_row(session)

    first, last = trained(lambda session: session)
    _, rounded = trained(RoundedSession)
    change = np.linalg.norm(last - first)
    assert change > 0
    assert np.linalg.norm(rounded - last) <= LIMIT * change


def as_one_row(session):
    return np.concatenate([value.reshape(-1) for value in session.parameters().values()])
