"""The arrival times of updates on the emulated clock, which starts at 0 for every collection."""

from collections.abc import Mapping

from broker_server.rounds.collecting import Collection, OpenTask
from broker_server.store import Store
from simulation.board_times import BoardTimes
from simulation.virtual_fleet import VirtualBoard


class AnswerTimes:
    """The times of the answers to one collection.

    For a device that works beyond a round, the duration of that round is subtracted.
    """

    def __init__(self, boards: Mapping[str, VirtualBoard], times: BoardTimes) -> None:
        self._boards = boards
        self._times = times
        self._collected: dict[int, float] = {}  # seconds that collecting took, by past round

    def begin(self, collection: Collection, store: Store, run: str) -> None:
        """Read the durations of the rounds in which tasks of a collection began."""
        self._collected = {}
        # Statistics take no emulated time, so they need no durations.
        if collection.kind != "train":
            return
        oldest = collection.number
        for task in collection.tasks.values():
            oldest = min(oldest, task.record.round)
        # Tasks of earlier rounds may still be open, and their devices have worked since.
        for record in store.rounds(run, last=collection.number - oldest + 1):
            self._collected[record.number] = record.collect_seconds or 0.0

    def leaving_share(self, task: OpenTask) -> float | None:
        """Return the share of its time after which a device leaves the round; None if it stays."""
        board = self._boards[task.record.device]
        return board.leaving_share(task.instructions.train.seed, task.record.round)

    def seconds(self, task: OpenTask) -> float:
        """Return the seconds until the result of a task arrives; 0 for statistics."""
        record = task.record
        if record.kind != "train":
            return 0.0
        board = self._boards[record.device]
        whole = self._times.round_seconds(
            board.index, record, task.instructions.train, board.examples
        )
        worked = self._seconds_since(record.round)
        # Only a past round has a duration; the newest one is the round of this collection.
        has_ended = record.round in self._collected and record.round < max(self._collected)
        share = self.leaving_share(task) if has_ended else None
        if share is not None:
            # A device that left in an earlier round returned in the next one.
            away = self._collected[record.round] - share * whole
            worked -= max(0.0, away)
        return max(0.0, whole - worked)

    def _seconds_since(self, first: int) -> float:
        """Return the total collection time of past rounds, from this one on."""
        durations: list[float] = []
        for number, seconds in self._collected.items():
            if number >= first:
                durations.append(seconds)
        return sum(durations)
