"""The interface of a routine, which is a kind of task.

Each routine is a separate file, which a row of the registry names.
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
"""The state of the agent that works on a routine."""


class NoSettings(FrozenModel):
    """The settings of a routine that has no settings."""


@dataclass(frozen=True)
class Result:
    """The result of a routine.

    Attributes:
        tensors: tensors of the update, by name.
        batches: number of batches processed; in training, of steps.
        seconds: time of the computation only.
        loss: mean of the last epoch; None if nothing is trained.
        mean_loss: over all steps, if it is known.
        evaluation: on the board's held-out samples, if it keeps any.
        shared_evaluation: the same of the model without what only this board has.
    """

    tensors: Mapping[str, NDArray[Any]]
    batches: int
    seconds: float
    loss: float | None = None
    mean_loss: float | None = None
    evaluation: Evaluation | None = None
    shared_evaluation: Evaluation | None = None


@dataclass(frozen=True)
class Routine:
    """How one routine works.

    Attributes:
        name: name of the routine in offers.
        phase: the state of the agent that works on it. The board's limits of width and depth apply
            to training; measuring makes only forward passes.
        settings: schema of the routine's settings in an offer.
        graphs: returns the keys of the graphs of an artifact set that it needs on a board, or
            raises RefusedError if the set lacks one.
        run: runs a task.
        join: raises RefusedError, before anything is fetched, if a board does not support the task.
        own_model: whether it trains a model that the board brings, beside the one that is sent.
        tells_samples: whether the server learns how many samples and batches the board has trained
            on; not so where every update counts alike, so that nobody needs the number.
    """

    name: str
    phase: Phase
    settings: type[FrozenModel]
    graphs: Callable[[Manifest, DeviceSetup], tuple[str, ...]]
    run: Callable[[Task, DeviceSetup, Hooks], Result]
    join: Callable[[Instructions, DeviceSetup], None] = lambda _instructions, _bench: None
    own_model: bool = False
    tells_samples: bool = True


def missing_graph(manifest: Manifest, purpose: str) -> RefusedError:
    """Return the refusal of a set that lacks a graph for some purpose."""
    return RefusedError(
        RefusalReason.UNSUPPORTED,
        f"artifact set {manifest.arch} {manifest.tier} has no graph for {purpose} "
        f"(it has {', '.join(sorted(manifest.graphs))}); export it again",
    )
