"""What a routine is: what a task may ask of a device.

Each routine is a file of its own, which a row of the registry names.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from numpy.typing import NDArray

from device_runtime.training.hooks import Hooks
from device_runtime.training.task import DeviceSetup, Task
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.manifest import Manifest
from fleet_protocol.messages import Evaluation, Instructions

Phase = Literal["training", "measuring"]
"""Which state of the agent works on a routine."""


class NoSettings(FrozenModel):
    """The settings of a routine that has none of its own."""


@dataclass(frozen=True)
class Result:
    """What a routine ends with.

    Attributes:
        tensors: of the update, by name.
        batches: number of batches processed; steps, in training.
        seconds: time of the work alone.
        loss: mean of the last epoch; None where nothing is trained.
        mean_loss: of all steps, where it is known.
        evaluation: on the board's held-out samples, when it keeps any.
    """

    tensors: Mapping[str, NDArray[Any]]
    batches: int
    seconds: float
    loss: float | None = None
    mean_loss: float | None = None
    evaluation: Evaluation | None = None


@dataclass(frozen=True)
class Routine:
    """How one routine works.

    Attributes:
        name: as in offers.
        phase: the state of the agent that works on it. The board's limits of width and depth count
            for training; what measures makes forward passes alone.
        settings: schema of the settings that an offer has for it.
        graphs: keys of the graphs of an artifact set that it needs on a board, raising RefusedError
            where the set lacks one.
        run: does a task.
        join: raises RefusedError, before anything is fetched, where a board cannot do what is
            asked.
    """

    name: str
    phase: Phase
    settings: type[FrozenModel]
    graphs: Callable[[Manifest, DeviceSetup], tuple[str, ...]]
    run: Callable[[Task, DeviceSetup, Hooks], Result]
    join: Callable[[Instructions, DeviceSetup], None] = lambda _instructions, _bench: None


def missing_graph(manifest: Manifest, purpose: str) -> RefusedError:
    """Return the refusal of a set that lacks a graph for some purpose."""
    return RefusedError(
        RefusalReason.UNSUPPORTED,
        f"artifact set {manifest.arch} {manifest.tier} has no graph for {purpose} "
        f"(it has {', '.join(sorted(manifest.graphs))}); export it again",
    )
