"""Tries execution providers and thread counts before a task trains on them.

A trial trains a few steps of the step graph on synthetic samples, on the CPU and on the provider,
from the same weights. The result is saved in a file by graph, runtime and provider. If a provider
is wrong, broken or slow, training uses the CPU.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import RootModel, ValidationError

from device_runtime.training.backends.runtime import CPU, offered
from device_runtime.training.backends.session import TrainSession
from device_runtime.training.hooks import ChosenProvider, Hooks, TaskStopped
from device_runtime.training.trial_steps import ComparedSteps, ReferenceSteps, TrialTask
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.errors import StorageError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.manifest import Manifest

LIMIT = 3e-3
"""Largest deviation of losses, parameters or states from the CPU's, as a share of their change.

With two threads, the losses and states of all benchmarked models deviate by at most 3e-7, and the
parameters by 8e-4. With the gradients of OpenVINO, which are wrong below a max-pool, the states of
eleven models deviate by 9.6e-3 and more.
"""

# The limit for parameters if states are compared as well: Adam makes full steps for gradients that
# are zero apart from rounding.
_LOOSE = 3e-1
_WORTH = 1.25  # least speed compared with the CPU; a smaller gain may be chance on a busy board
# the same for more threads, which need no copies and compute the same numbers
_WORTH_OF_THREADS = 1.1
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
            StorageError: the disk has no space for a trial.
            TaskStopped: a hook requested it.
        """
        trials = _Trials(TrialTask(manifest, batch, hooks, self.path.parent), open_graph)
        refused: list[str] = []
        present = offered()
        for name in self.names:
            if name.partition(":")[0] not in present:
                refused.append(
                    f"{name} is not a provider of this onnxruntime (it has {', '.join(present)})"
                )
                continue
            trial = self._trial(graph, name, trials)
            if not trial.fault and (self.insist or trial.speed >= _WORTH):
                return ChosenProvider(name, f"it {trial}")
            refused.append(f"{name} {trial}")
        settled = self._fastest_threads(graph, trials)
        return ChosenProvider(settled.provider, "; ".join([*refused, settled.why]).rstrip("; "))

    def _fastest_threads(self, graph: str, trials: "_Trials") -> ChosenProvider:
        """Return the CPU with the fastest number of threads; one if more gain too little."""
        settled = ChosenProvider(CPU, "")
        fastest = _WORTH_OF_THREADS
        slower: list[str] = []
        for count in self.threads:
            name = f"{CPU}:{count}"
            trial = self._trial(graph, name, trials)
            if trial.fault or trial.speed < fastest:
                slower.append(f"{name} {trial}")
                continue
            fastest = trial.speed
            bits = "with the same bits" if trial.same_bits else "with different last bits"
            settled = ChosenProvider(name, f"it {trial} with one thread, {bits}")
        if settled.provider == CPU:
            return ChosenProvider(CPU, "; ".join(slower))
        return settled

    def _trial(self, graph: str, name: str, trials: "_Trials") -> Trial:
        """Return the saved trial of a provider, or a new one."""
        key = f"{graph} {name}"
        return self.known().get(key) or self._try(key, name, trials)

    def _try(
        self,
        key: str,
        name: str,
        trials: "_Trials",
    ) -> Trial:
        expected = trials.expected
        trial = None
        # Saved first, as the result if the trial takes the process down.
        fatal = f"crashed the agent in a trial; remove {self.path} to try it again"
        self.note(key, Trial(fault=fatal))
        try:
            steps = ComparedSteps(trials.open_graph(name), trials.task, expected)
            trial = Trial(
                fault=_fault(steps, expected),
                speed=expected.seconds / max(steps.seconds, 1e-9),
                same_bits=steps.same_bits,
            )
        except TaskStopped:
            raise
        except Exception as error:  # noqa: BLE001  (the errors of onnxruntime have no base)
            trial = Trial(fault=f"failed in a trial: {type(error).__name__}: {error}"[:500])
        finally:
            self.note(key, trial)
        return trial


@dataclass(frozen=True)
class _Trials:
    """The trials of one graph.

    Attributes:
        task: what every provider does.
        open_graph: opens the graph on a given provider.
    """

    task: TrialTask
    open_graph: Callable[[str], TrainSession]

    @functools.cached_property
    def expected(self) -> ReferenceSteps:
        """The CPU's steps, which serve all providers that are tried."""
        return ReferenceSteps(self.open_graph(CPU), self.task)


def _fault(steps: ComparedSteps, expected: ReferenceSteps) -> str:
    """Return the results of a trial that deviate too far; empty if they agree."""
    has_states = expected.has_states
    changes = (
        float(np.linalg.norm(expected.losses)),
        expected.state_change,
        expected.parameter_change,
    )
    limits = (LIMIT, LIMIT, _LOOSE if has_states else LIMIT)
    names = ("loss", "states", "parameters")
    for name, change, limit, deviation in zip(
        names, changes, limits, steps.deviations, strict=True
    ):
        off = deviation / max(change, 1e-30)
        if not off <= limit:  # written so that NaN counts as too far
            return (
                f"computes wrong {name}: the deviation is {off:.1e} of the CPU's change, "
                f"and the limit is {limit:.0e}"
            )
    return ""
