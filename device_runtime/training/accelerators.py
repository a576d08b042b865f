"""Execution providers beside the CPU, or more of its threads: tried on a step graph before a task
trains on one.

A trial trains a few steps on made-up samples, on the CPU and on the provider, from the same
weights. What it finds is kept in a file by graph, runtime and provider. A provider that is wrong,
broken or slow leaves the training to the CPU.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import RootModel, ValidationError

from device_runtime.training.backends.runtime import CPU, offered
from device_runtime.training.backends.session import TrainSession
from device_runtime.training.epochs import made_up_steps
from device_runtime.training.hooks import Hooks, Settled, TaskStopped
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.errors import StorageError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.manifest import Manifest

LIMIT = 3e-2
"""Largest deviation of losses, parameters or states from the CPU's, as a share of what the steps
have changed.

The same batches in another order, so summed in another order, deviate by 4e-6 at most in the zoo's
models that were measured, and OpenVINO's gradients, which are wrong below a max-pool, by 1.4e-1 and
more.
"""

# of parameters, where states tell more: Adam makes whole steps of gradients that are zero but for
# rounding
_LOOSE = 3e-1
_WORTH = 1.25  # times the CPU's speed, at least; less may be chance on a busy board
_STEPS = 5  # the first is not timed: a provider compiles and chooses kernels in it
_KEPT = 64


class Trial(FrozenModel):
    """What was found of a provider: why it must not be used, or its steps in the time of one of the
    CPU.
    """

    fault: str = ""
    speed: float = 0.0

    def __str__(self) -> str:
        return self.fault or f"makes {self.speed:.2f} steps in the time of one of the CPU"


class Trials(RootModel[dict[str, Trial]]):
    """Trials by graph, runtime and provider; newest last."""


@dataclass(frozen=True)
class Accelerators:
    """What an operator wants tried, in order, as onnxruntime names it without ``ExecutionProvider``
    at the end.

    ``CPU:4`` is the CPU with four threads. Who insists takes one although it is slower than the
    CPU.
    """

    path: Path
    names: tuple[str, ...]
    insist: bool = False

    def known(self) -> Mapping[str, Trial]:
        """What the file has; nothing where it is lost."""
        with contextlib.suppress(OSError, ValidationError):
            return Trials.model_validate_json(self.path.read_bytes()).root
        return {}

    def note(self, key: str, trial: Trial | None) -> None:
        """Keep what was found by graph, runtime and provider, or forget it."""
        others = {name: old for name, old in self.known().items() if name != key}
        known = list((others if trial is None else {**others, key: trial}).items())
        with contextlib.suppress(StorageError):  # then it is tried again
            write_atomically(
                self.path,
                Trials(dict(known[-_KEPT:])).model_dump_json(indent=1).encode(),
            )

    def settle(
        self,
        graph: str,
        manifest: Manifest,
        batch: int,
        opened: Callable[[str], TrainSession],
        hooks: Hooks,
    ) -> Settled:
        """The first provider that is right and worth its while on a graph, by what is known of it
        or a trial.

        A graph is named by the digest of the step graph, with the runtime.

        Raises:
            TaskStopped: the hooks said so.
        """
        run = functools.cache(lambda name: _Steps(opened(name), manifest, batch, hooks))
        refused = []
        there = offered()
        for name in self.names:
            if name.partition(":")[0] not in there:
                refused.append(f"{name} is none of what this onnxruntime has ({', '.join(there)})")
                continue
            found = self.known().get(f"{graph} {name}") or self._tried(f"{graph} {name}", name, run)
            if not found.fault and (self.insist or found.speed >= _WORTH):
                return Settled(name, f"it {found}")
            refused.append(f"{name} {found}")
        return Settled(CPU, "; ".join(refused))

    def _tried(self, key: str, name: str, run: Callable[[str], "_Steps"]) -> Trial:
        expected = run(CPU)
        found = None
        # If the trial takes the process down, this is what is known.
        self.note(
            key,
            Trial(fault=f"took the agent down in a trial; remove {self.path} to try it again"),
        )
        try:
            steps = run(name)
            found = Trial(
                fault=expected.denies(steps),
                speed=expected.seconds / max(steps.seconds, 1e-9),
            )
        except TaskStopped:
            raise
        except Exception as error:  # noqa: BLE001  (the errors of onnxruntime have no base)
            found = Trial(fault=f"failed in a trial: {type(error).__name__}: {error}"[:500])
        finally:
            self.note(key, found)
        return found


class _Steps:
    """The steps of a trial: losses, parameters and states, each in one row, and the time of the
    fastest step.
    """

    def __init__(self, session: TrainSession, manifest: Manifest, batch: int, hooks: Hooks) -> None:
        losses = [0.0]
        times = [time.perf_counter()]
        rows = []
        for loss in islice(made_up_steps(session, manifest, batch), _STEPS):
            times.append(time.perf_counter())
            losses.append(loss)
            if len(losses) in {2, _STEPS + 1}:
                rows.append((_row(session.parameters()), _row(session.states())))
            hooks.go_on()
        self.seconds = float(np.diff(times)[1:].min())
        (first, states), (last, later) = rows
        self.rows = (
            np.array(losses),
            states,
            last,
        )  # states while the weights are still the CPU's to the last bits
        self.changes = (np.array(losses), later - states, last - first)
        self.limits = (LIMIT, LIMIT, LIMIT if len(states) == 1 else _LOOSE)

    def denies(self, other: "_Steps") -> str:
        """What of another's is too far from this; empty if it agrees."""
        names = ("loss", "states", "parameters")
        for name, change, limit, mine, theirs in zip(
            names, self.changes, self.limits, self.rows, other.rows, strict=True
        ):
            off = float(np.linalg.norm(theirs - mine)) / max(float(np.linalg.norm(change)), 1e-30)
            if not off <= limit:
                return f"computes wrong {name}: off by {off:.1e} of the CPU's change, and {limit:.0e} is the limit"
        return ""


def _row(tensors: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """All numbers that gradients make, without counters; a copy."""
    made = [value.ravel() for value in tensors.values() if value.shape and value.dtype.kind == "f"]
    return np.concatenate([np.zeros(1, np.float32), *made])
