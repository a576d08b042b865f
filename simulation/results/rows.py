"""From what the store says about a closed round to the rows of the history."""

import time
from collections import Counter
from collections.abc import Sequence

from broker_server.rounds.run_context import RunContext
from broker_server.store import RoundRecord, Store, TaskPhase, TaskRecord
from broker_server.store.privacy_spent import epsilons
from broker_server.store.queries import find_run
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.messages import Evaluation
from simulation.judges import Judges
from simulation.results.history import DeviceRow, RoundRow
from simulation.virtual_fleet import VirtualFleet


class RowMaker:
    """Makes the rows of closed rounds, from the store, so that rows can be made again."""

    def __init__(
        self, context: RunContext, store: Store, blobs: BlobStore, fleet: VirtualFleet, judges: Judges
    ) -> None:
        self._context = context
        self._store = store
        self._blobs = blobs
        self._times = fleet.times
        self._index = {board.id: board.index for board in fleet.boards}
        self._judges = judges
        self._began = time.time()  # a round that a process goes on with takes no time while there is none

    def make(self, record: RoundRecord, before: RoundRow | None) -> tuple[RoundRow, tuple[DeviceRow, ...]]:
        """The row of a round, of which the last before it is known, and those of its devices."""
        numbers = range(before.round + 1 if before else 1, record.number + 1)
        found = [self._counted(record.run, number) for number in numbers]
        tasks, _ = found[-1]
        lost = self._store.rounds(record.run)[numbers[0] - 1 : record.number - 1] if numbers[1:] else []
        devices, train = [], self._context.config.train
        for task in tasks:
            if task.kind != "train" or task.phase is not TaskPhase.MERGED or task.metrics is None:
                continue
            metrics = task.metrics
            devices.append(
                DeviceRow(
                    round=record.number,
                    device=task.device,
                    tier=task.tier,
                    examples=metrics.examples,
                    train_loss=metrics.train_loss,
                    local_accuracy=metrics.evaluation.accuracy if metrics.evaluation is not None else None,
                    simulated_seconds=self._times.round_seconds(self._index[task.device], task, train),
                    seconds=metrics.train_seconds,
                    payload_bytes=task.update_size or 0,
                )
            )
        evaluation = record.evaluation
        losses = [row.train_loss for row in devices if row.train_loss is not None]
        simulated = sum(item.collect_seconds or 0.0 for item in (*lost, record))
        ended = record.ended_at or record.planned_at
        seconds = ended - (max(self._began, record.planned_at) if ended > self._began else record.planned_at)
        row = RoundRow(
            round=record.number,
            version=record.version + 1,
            accuracy=evaluation.accuracy if evaluation is not None else None,
            loss=evaluation.loss if evaluation is not None else None,
            train_loss=sum(losses) / len(losses) if losses else None,
            devices=len(devices),
            tiers=Counter(row.tier for row in devices),
            simulated_seconds=simulated,
            simulated_total=(before.simulated_total if before else 0.0) + simulated,
            seconds=max(0.0, seconds),
            payload_bytes=sum(payload for _, payload in found),
            local_accuracy=self._local_accuracy(
                record, [task.metrics.evaluation for task in tasks if task.kind == "train" and task.metrics is not None]
            ),
            epsilon=epsilons(self._store, find_run(self._store, record.run)).get(record.number),
            **self._judged(record),
        )
        return row, tuple(devices)

    def _counted(self, run: str, number: int) -> tuple[list[TaskRecord], int]:
        """The tasks that count in a round, late ones with them, and the bytes of their updates and of what it sent."""
        own = self._store.tasks(run, number)
        weights = {task.weights.digest: task.weights.size for task in own}  # what several devices share is sent once
        found = (*own, *(self._store.late(run, number) if self._context.config.round.buffer is not None else ()))
        counted = [task for task in found if task.screening is None or task.screening.round in {None, number}]
        return counted, sum(weights.values()) + sum(task.update_size or 0 for task in counted)

    def _judged(self, record: RoundRecord) -> dict[str, float]:
        wanted = bool(self._judges.others) and record.evaluation is not None
        version = self._store.version(record.run, record.version + 1) if wanted else None
        return {} if version is None else {name: of(version, self._blobs) for name, of in self._judges.others.items()}

    def _local_accuracy(self, record: RoundRecord, found: Sequence[Evaluation | None]) -> float | None:
        """Of the global version where the devices have parts of the test set, else of their own models."""
        if self._judges.local is not None and record.evaluation is not None:
            version = self._store.version(record.run, record.version + 1)
            return None if version is None else self._judges.local(version, self._blobs)
        own = [(item.accuracy, item.examples) for item in found if item is not None and item.accuracy is not None]
        return sum(share * count for share, count in own) / sum(count for _, count in own) if own else None
