"""Execution providers beside the CPU, or more of its threads: tried before a task trains on one.

A trial trains a few steps of the step graph on made-up samples, on the CPU and on the provider,
from the same weights. Its result is kept in a file by graph, runtime and provider. A provider that
is wrong, broken or slow leaves the training to the CPU.
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
_WORTH_OF_THREADS = 1.1  # the same of more threads, which cost no copies and no other numbers
_STEPS = 5  # the first is not timed: a provider compiles and chooses kernels in it
_KEPT = 64


class Trial(FrozenModel):
    """What was found of a provider.

    Attributes:
        fault: why it must not be used; empty where it may.
        speed: its steps in the time of one of the CPU.
        same_bits: whether its steps left what the CPU's left, to the last bit.
    """

    fault: str = ""
    speed: float = 0.0
    same_bits: bool = False

    def __str__(self) -> str:
        return self.fault or f"makes {self.speed:.2f} steps in the time of one of the CPU"


class Trials(RootModel[dict[str, Trial]]):
    """Trials by graph, runtime and provider; newest last."""


@dataclass(frozen=True)
class Accelerators:
    """What an operator wants tried.

    Attributes:
        path: file of the trials.
        names: of providers, in order, as onnxruntime names them without ``ExecutionProvider`` at
            the end; ``CPU:4`` is the CPU with four threads.
        insist: take one although it is slower than the CPU.
        threads: numbers of threads of the CPU, of which the fastest is taken where no provider is.
    """

    path: Path
    names: tuple[str, ...]
    insist: bool = False
    threads: tuple[int, ...] = ()

    def known(self) -> Mapping[str, Trial]:
        """Return what the file has; nothing where it is lost."""
        with contextlib.suppress(OSError, ValidationError):
            return Trials.model_validate_json(self.path.read_bytes()).root
        return {}

    def note(self, key: str, trial: Trial | None) -> None:
        """Keep a trial by graph, runtime and provider, or forget it."""
        trials = {name: old for name, old in self.known().items() if name != key}
        if trial is not None:
            trials[key] = trial  # the newest is the last
        newest = dict(list(trials.items())[-_KEPT:])
        with contextlib.suppress(StorageError):  # then it is tried again
            write_atomically(self.path, Trials(newest).model_dump_json(indent=1).encode())

    def settle(
        self,
        graph: str,
        manifest: Manifest,
        batch: int,
        open_graph: Callable[[str], TrainSession],
        hooks: Hooks,
    ) -> Settled:
        """Return the first provider that is right and worth its while, by a known trial or a new.

        Else the CPU, with as many threads as are fastest.

        Args:
            graph: digest of the step graph, with the runtime.
            manifest: of its artifact set.
            batch: samples of a step.
            open_graph: opens the graph on a provider, which it is called with.
            hooks: may stop a trial.

        Raises:
            TaskStopped: the hooks said so.
        """
        # Cached, so that the CPU's steps serve every provider that is tried.
        take_steps = functools.cache(lambda name: _Steps(open_graph(name), manifest, batch, hooks))
        refused: list[str] = []
        present = offered()
        for name in self.names:
            if name.partition(":")[0] not in present:
                refused.append(
                    f"{name} is none of what this onnxruntime has ({', '.join(present)})"
                )
                continue
            trial = self._trial(graph, name, take_steps)
            if not trial.fault and (self.insist or trial.speed >= _WORTH):
                return Settled(name, f"it {trial}")
            refused.append(f"{name} {trial}")
        settled = self._fastest_threads(graph, take_steps)
        return Settled(settled.provider, "; ".join([*refused, settled.why]).rstrip("; "))

    def _fastest_threads(self, graph: str, take_steps: Callable[[str], "_Steps"]) -> Settled:
        """Return the CPU with as many threads as are fastest, with one where more hardly pay."""
        settled = Settled(CPU, "")
        fastest = _WORTH_OF_THREADS
        slower: list[str] = []
        for count in self.threads:
            name = f"{CPU}:{count}"
            trial = self._trial(graph, name, take_steps)
            if trial.fault or trial.speed < fastest:
                slower.append(f"{name} {trial}")
                continue
            fastest = trial.speed
            bits = "to the same bits" if trial.same_bits else "to other last bits"
            settled = Settled(name, f"it {trial} with one thread, {bits}")
        if settled.provider == CPU:
            return Settled(CPU, "; ".join(slower))
        return settled

    def _trial(self, graph: str, name: str, take_steps: Callable[[str], "_Steps"]) -> Trial:
        """Return the known trial of a provider, or a new one."""
        key = f"{graph} {name}"
        return self.known().get(key) or self._try(key, name, take_steps)

    def _try(
        self,
        key: str,
        name: str,
        take_steps: Callable[[str], "_Steps"],
    ) -> Trial:
        expected = take_steps(CPU)
        trial = None
        # If the trial takes the process down, this is what is known.
        fatal = f"took the agent down in a trial; remove {self.path} to try it again"
        self.note(key, Trial(fault=fatal))
        try:
            steps = take_steps(name)
            trial = Trial(
                fault=expected.deviation_of(steps),
                speed=expected.seconds / max(steps.seconds, 1e-9),
                same_bits=expected.equals(steps),
            )
        except TaskStopped:
            raise
        except Exception as error:  # noqa: BLE001  (the errors of onnxruntime have no base)
            trial = Trial(fault=f"failed in a trial: {type(error).__name__}: {error}"[:500])
        finally:
            self.note(key, trial)
        return trial


class _Steps:
    """The steps of a trial.

    Attributes:
        seconds: of the fastest step but the first.
        rows: losses, states after the first step, parameters after the last, each in one row.
        changes: how much the steps have changed each of these.
        limits: of their deviations, as shares of that.
    """

    def __init__(
        self,
        session: TrainSession,
        manifest: Manifest,
        batch: int,
        hooks: Hooks,
    ) -> None:
        losses = [0.0]
        times = [time.perf_counter()]
        tensors: list[tuple[NDArray[Any], NDArray[Any]]] = []
        for loss in islice(made_up_steps(session, manifest, batch), _STEPS):
            times.append(time.perf_counter())
            losses.append(loss)
            if len(losses) in {2, _STEPS + 1}:  # after the first and after the last
                tensors.append((_row(session.parameters()), _row(session.states())))
            hooks.go_on()
        self.seconds = float(np.diff(times)[1:].min())
        (first_parameters, first_states), (last_parameters, last_states) = tensors
        loss_row = np.array(losses)
        # States while the weights are still the CPU's to the last bits.
        self.rows = (loss_row, first_states, last_parameters)
        self.changes = (loss_row, last_states - first_states, last_parameters - first_parameters)
        has_states = len(first_states) > 1
        self.limits = (LIMIT, LIMIT, _LOOSE if has_states else LIMIT)

    def equals(self, other: "_Steps") -> bool:
        """Return whether another's steps left the same bits."""
        return all(map(np.array_equal, self.rows, other.rows))

    def deviation_of(self, other: "_Steps") -> str:
        """Return what of another's steps is too far from these; empty if they agree."""
        names = ("loss", "states", "parameters")
        for name, change, limit, expected, actual in zip(
            names, self.changes, self.limits, self.rows, other.rows, strict=True
        ):
            size = max(float(np.linalg.norm(change)), 1e-30)
            off = float(np.linalg.norm(actual - expected)) / size
            if not off <= limit:  # so that no number is too far, too
                return (
                    f"computes wrong {name}: off by {off:.1e} of the CPU's change, "
                    f"and {limit:.0e} is the limit"
                )
        return ""


def _row(tensors: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """Return all numbers that gradients make, without counters; a copy."""
    numbers = [value for value in tensors.values() if value.shape and value.dtype.kind == "f"]
    # A tensor in front, so that there is a row where there are no states.
    return np.concatenate([np.zeros(1, np.float32), *(value.ravel() for value in numbers)])
