"""How a running task communicates with its caller: its reports, and the request to stop."""

from collections.abc import Callable
from dataclasses import dataclass


class TaskStopped(Exception):  # noqa: N818 - no error: it was asked for
    """Nobody wants the result any more."""


@dataclass(frozen=True)
class EpochReport:
    """Progress of training.

    Attributes:
        epoch: number of finished epochs.
        epochs: number of all epochs.
        step: number of finished steps.
        loss: mean of the last epoch, weighted by labels that count.
    """

    epoch: int
    epochs: int
    step: int
    loss: float


@dataclass(frozen=True)
class SelfTested:
    """A training graph passed its self-test; names are those of the cache's index."""

    name: str


@dataclass(frozen=True)
class ChosenProvider:
    """The provider for the steps of a task that begins or begins again.

    Attributes:
        provider: provider of onnxruntime.
        why: the reason for that choice.
    """

    provider: str
    why: str


@dataclass(frozen=True)
class Hooks:
    """Functions that a running task calls; the default ones do nothing and never stop it.

    Attributes:
        report: called with an `EpochReport`, a `SelfTested`, or a `ChosenProvider` at a choice.
        stopped: called before every step; true if the result is no longer wanted.
    """

    report: Callable[[object], None] = lambda _report: None
    stopped: Callable[[], bool] = lambda: False

    def go_on(self) -> None:
        """Return if the result is still wanted, else raise `TaskStopped`."""
        if self.stopped():
            raise TaskStopped
