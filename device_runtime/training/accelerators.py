"""Tries execution providers and thread counts before a task trains on them.

A trial trains a few steps of the step graph on synthetic samples, on the CPU and on the provider,
from the same weights. The result is saved in a file by graph, runtime and provider. If a provider
is wrong, broken or slow, training uses the CPU.
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
from device_runtime.training.hooks import ChosenProvider, Hooks, TaskStopped
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.errors import StorageError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.manifest import Manifest

LIMIT = 3e-2
"""Largest deviation of losses, parameters or states from the CPU's, as a share of their change.

If the same batches are summed in another order, the measured models of the zoo deviate by at most
4e-6. OpenVINO's gradients, which are wrong below a max-pool, deviate by 1.4e-1 and more.
"""

# The limit for parameters if states are compared as well: Adam makes full steps for gradients that
# are zero apart from rounding.
_LOOSE = 3e-1
_WORTH = 1.25  # least speed compared with the CPU; a smaller gain may be chance on a busy board
# the same for more threads, which need no copies and compute the same numbers
_WORTH_OF_THREADS = 1.1
_STEPS = 5  # the first step is not timed: a provider compiles and chooses kernels in it
_KEPT = 64


class Trial(FrozenModel):
    """The result of a trial.

    Attributes:
        fault: why the provider must not be used; empty if it may.
        speed: number of its steps in the time of one CPU step.
        same_bits: whether its results equal the CPU's to the last bit.
    """

    fault: str = ""
    speed: float = 0.0
    same_bits: bool = False

    def __str__(self) -> str:
        return self.fault or f"makes {self.speed:.2f} steps in the time of one CPU step"


class Trials(RootModel[dict[str, Trial]]):
    """Trials by graph, runtime and provider; newest last."""


@dataclass(frozen=True)
class Accelerators:
    """The providers and thread counts that an operator wants tried.

    Attributes:
        path: file that holds the trials.
        names: names of providers, in order, as onnxruntime names them without the suffix
            ``ExecutionProvider``; ``CPU:4`` is the CPU with four threads.
        insist: use a provider even if it is slower than the CPU.
        threads: thread counts of the CPU; if no provider is used, the fastest of them is.
    """

    path: Path
    names: tuple[str, ...]
    insist: bool = False
    threads: tuple[int, ...] = ()

    def known(self) -> Mapping[str, Trial]:
        """Return the trials in the file; none if it is lost."""
        with contextlib.suppress(OSError, ValidationError):
            return Trials.model_validate_json(self.path.read_bytes()).root
        return {}

    def note(self, key: str, trial: Trial | None) -> None:
        """Save a trial by graph, runtime and provider, or remove it."""
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
    ) -> ChosenProvider:
        """Return the first provider that is correct and fast enough, by a saved or a new trial.

        If there is none, it is the CPU with the fastest number of threads.

        Args:
            graph: digest of the step graph, with the runtime.
            manifest: manifest of its artifact set.
            batch: samples of a step.
            open_graph: opens the graph on a given provider.
            hooks: may stop a trial.

        Raises:
            TaskStopped: a hook requested it.
        """
        # Cached, so that the CPU's steps serve all providers that are tried.
        take_steps = functools.cache(lambda name: _Steps(open_graph(name), manifest, batch, hooks))
        refused: list[str] = []
        present = offered()
        for name in self.names:
            if name.partition(":")[0] not in present:
                refused.append(
                    f"{name} is not a provider of this onnxruntime (it has {', '.join(present)})"
                )
                continue
            trial = self._trial(graph, name, take_steps)
            if not trial.fault and (self.insist or trial.speed >= _WORTH):
                return ChosenProvider(name, f"it {trial}")
            refused.append(f"{name} {trial}")
        settled = self._fastest_threads(graph, take_steps)
        return ChosenProvider(settled.provider, "; ".join([*refused, settled.why]).rstrip("; "))

    def _fastest_threads(self, graph: str, take_steps: Callable[[str], "_Steps"]) -> ChosenProvider:
        """Return the CPU with the fastest number of threads; one if more gain too little."""
        settled = ChosenProvider(CPU, "")
        fastest = _WORTH_OF_THREADS
        slower: list[str] = []
        for count in self.threads:
            name = f"{CPU}:{count}"
            trial = self._trial(graph, name, take_steps)
            if trial.fault or trial.speed < fastest:
                slower.append(f"{name} {trial}")
                continue
            fastest = trial.speed
            bits = "with the same bits" if trial.same_bits else "with different last bits"
            settled = ChosenProvider(name, f"it {trial} with one thread, {bits}")
        if settled.provider == CPU:
            return ChosenProvider(CPU, "; ".join(slower))
        return settled

    def _trial(self, graph: str, name: str, take_steps: Callable[[str], "_Steps"]) -> Trial:
        """Return the saved trial of a provider, or a new one."""
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
        # Saved first, as the result if the trial takes the process down.
        fatal = f"crashed the agent in a trial; remove {self.path} to try it again"
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
        seconds: seconds of the fastest step, excluding the first.
        rows: losses, states after the first step, parameters after the last, one row each.
        changes: how much the steps changed each of these.
        limits: limits of their deviations, as shares of the changes.
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
            if len(losses) in {2, _STEPS + 1}:  # after the first and after the last step
                tensors.append((_row(session.parameters()), _row(session.states())))
            hooks.go_on()
        self.seconds = float(np.diff(times)[1:].min())
        (first_parameters, first_states), (last_parameters, last_states) = tensors
        loss_row = np.array(losses)
        # States while the weights still equal the CPU's to the last bits.
        self.rows = (loss_row, first_states, last_parameters)
        self.changes = (loss_row, last_states - first_states, last_parameters - first_parameters)
        has_states = len(first_states) > 1
        self.limits = (LIMIT, LIMIT, _LOOSE if has_states else LIMIT)

    def equals(self, other: "_Steps") -> bool:
        """Return whether another trial's steps gave the same bits."""
        return all(map(np.array_equal, self.rows, other.rows))

    def deviation_of(self, other: "_Steps") -> str:
        """Return the results of another trial that deviate too far; empty if they agree."""
        names = ("loss", "states", "parameters")
        for name, change, limit, expected, actual in zip(
            names, self.changes, self.limits, self.rows, other.rows, strict=True
        ):
            size = max(float(np.linalg.norm(change)), 1e-30)
            off = float(np.linalg.norm(actual - expected)) / size
            if not off <= limit:  # written so that NaN counts as too far
                return (
                    f"computes wrong {name}: the deviation is {off:.1e} of the CPU's change, "
                    f"and the limit is {limit:.0e}"
                )
        return ""


def _row(tensors: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """Return a copy of all numbers that come from gradients, without counters."""
    numbers = [value for value in tensors.values() if value.shape and value.dtype.kind == "f"]
    # An empty tensor first, so that there is a row even without states.
    return np.concatenate([np.zeros(1, np.float32), *(value.ravel() for value in numbers)])
