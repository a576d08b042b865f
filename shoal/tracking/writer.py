"""The interface of all tracking targets, and the values of a round that they receive."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from broker_server.store import RunRecord, Store, queries
from fleet_protocol.messages import Evaluation

_PHASES = ("merged", "missed", "refused", "declined", "left-out")


class Writer(Protocol):
    """A target of tracking."""

    def update(self, opened: Store, run: RunRecord) -> int:
        """Write new rounds of the store, and return their number."""

    def end(self, status: str, /) -> None:
        """Finish writing; the status is that of the run."""


class RoundWriter(ABC):
    """Writes each round once, when it can no longer change."""

    _next_round: int | None = None
    _ended_at: float | None = None
    """End of the run in seconds since 1970; None while it is in progress."""

    @abstractmethod
    def begin(self, run: RunRecord) -> int:
        """Open the target of a run, and return the number of the first missing round."""

    @abstractmethod
    def write(self, view: queries.RoundView) -> None:
        """Write a round that has ended."""

    def update(self, opened: Store, run: RunRecord) -> int:
        """Write the rounds that have ended since the last call, see `Writer.update`."""
        if self._next_round is None:
            self._next_round = self.begin(run)
        first = self._next_round
        views = queries.rounds(opened, run.id, first=first)
        self._ended_at = queries.find_run(opened, run.id).ended_at
        for view in views:
            # Rounds are written in order, so a round that may change holds back all later ones.
            if not self._is_final(view, views):
                break
            self.write(view)
            self._next_round = view.round.number + 1
        return self._next_round - first

    def _is_final(self, view: queries.RoundView, views: Sequence[queries.RoundView]) -> bool:
        """Return whether a round can no longer change.

        The evaluation of the newest round may still be running. A round ends only after the
        evaluation of the previous one.
        """
        if view.round.ended_at is None:
            return False
        # Any of these is written when a round's evaluation is over.
        if view.round.evaluation or view.round.note or view.round.reason or self._ended_at:
            return True
        number = view.round.number
        later = [following.round for following in views if following.round.number > number]
        return any(record.ended_at for record in later)


def values_of(view: queries.RoundView) -> Iterator[tuple[str, float]]:
    """Yield the known values of a round by name, such as `model/accuracy` and `round/seconds`."""
    evaluation = view.round.evaluation
    if evaluation is not None:
        yield from _scores("model", evaluation)
        for tier, tier_evaluation in evaluation.tiers.items():
            yield from _scores(f"tier/{tier}", tier_evaluation)
    yield from _known("round/", _numbers(view))
    yield from _known("devices/", {"accuracy": view.device_accuracy, **view.device_metrics})
    yield from _known("", {"epsilon": view.epsilon})


def _numbers(view: queries.RoundView) -> dict[str, float | None]:
    """Return the counts of tasks by phase, and the duration and bytes of a round."""
    numbers: dict[str, float | None] = {}
    for phase in _PHASES:
        numbers[phase] = float(view.phases.get(phase, 0))
    numbers["seconds"] = view.seconds
    numbers["sent_bytes"] = view.sent_bytes
    numbers["received_bytes"] = view.received_bytes
    return numbers


def _known(prefix: str, values: Mapping[str, float | None]) -> Iterator[tuple[str, float]]:
    """Yield the known values, with a prefix before their names."""
    for name, value in values.items():
        if value is not None:
            yield f"{prefix}{name}", value


def _scores(name: str, evaluation: Evaluation) -> Iterator[tuple[str, float]]:
    """Yield loss, accuracy and metrics of a model."""
    yield f"{name}/loss", evaluation.loss
    if evaluation.accuracy is not None:
        yield f"{name}/accuracy", evaluation.accuracy
    for metric in evaluation.metrics:
        yield f"{name}/{metric.name}", metric.value
