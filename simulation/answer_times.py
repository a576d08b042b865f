"""When the answer to a task comes on the emulated clock, which begins with every collection."""

from collections.abc import Mapping

from broker_server.rounds.collecting import Collection, OpenTask
from broker_server.store import Store
from simulation.board_times import BoardTimes
from simulation.virtual_fleet import VirtualBoard


class AnswerTimes:
    """The times of the answers to one collection.

    A device that goes on beyond a round has the time of that round behind it.
    """

    def __init__(self, boards: Mapping[str, VirtualBoard], times: BoardTimes) -> None:
        self._boards = boards
        self._times = times
        self._collected: dict[int, float] = {}  # seconds that collecting took, by past round

    def begin(self, collection: Collection, store: Store, run: str) -> None:
        """Read how long the rounds took in which tasks of a collection were begun."""
        self._collected = {}
        if collection.kind != "train":
            return
        oldest = collection.number
        for task in collection.tasks.values():
            oldest = min(oldest, task.record.round)
        for record in store.rounds(run, last=collection.number - oldest + 1):
            self._collected[record.number] = record.collect_seconds or 0.0

    def leaving_share(self, task: OpenTask) -> float | None:
        """Return after which share of its time a device leaves the round; None if it stays."""
        board = self._boards[task.record.device]
        return board.leaves(task.instructions.train.seed, task.record.round)

    def seconds(self, task: OpenTask) -> float:
        """Return after how many seconds the answer to a task comes; for statistics after none."""
        record = task.record
        if record.kind != "train":
            return 0.0
        board = self._boards[record.device]
        whole = self._times.round_seconds(
            board.index, record, task.instructions.train, board.examples
        )
        worked = self._seconds_since(record.round)
        has_ended = record.round in self._collected and record.round < max(self._collected)
        share = self.leaving_share(task) if has_ended else None
        if share is not None:
            # A device that left in an earlier round was back with the next one.
            away = self._collected[record.round] - share * whole
            worked -= max(0.0, away)
        return max(0.0, whole - worked)

    def _seconds_since(self, first: int) -> float:
        """Return how long collecting took in past rounds, from this one on."""
        durations: list[float] = []
        for number, seconds in self._collected.items():
            if number >= first:
                durations.append(seconds)
        return sum(durations)
