"""How a running task talks to its caller: what it reports, and when it must stop."""

from collections.abc import Callable
from dataclasses import dataclass


class TaskStopped(Exception):  # noqa: N818 - no error: it was asked for
    """Nobody wants the result any more."""


@dataclass(frozen=True)
class EpochReport:
    """How far training is.

    Attributes:
        epoch: number of finished epochs.
        epochs: of so many.
        step: number of finished steps.
        loss: mean of the last epoch, weighted by labels that count.
    """

    epoch: int
    epochs: int
    step: int
    loss: float


@dataclass(frozen=True)
class SelfTested:
    """A train graph passed its self-test; graph and runtime are named as in the cache's index."""

    name: str


@dataclass(frozen=True)
class Settled:
    """What computes the steps of a task that begins, now or anew.

    Attributes:
        provider: of onnxruntime.
        why: that one.
    """

    provider: str
    why: str


@dataclass(frozen=True)
class Hooks:
    """What a task calls while it runs; by default nobody listens and nobody stops it.

    Attributes:
        report: called with an `EpochReport`, a `SelfTested`, or a `Settled` at a choice.
        stopped: called before every step; true where nobody wants the result any more.
    """

    report: Callable[[object], None] = lambda _report: None
    stopped: Callable[[], bool] = lambda: False

    def go_on(self) -> None:
        """Return if the result is still wanted, else raise `TaskStopped`."""
        if self.stopped():
            raise TaskStopped
