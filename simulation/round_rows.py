"""Builds the rows of closed rounds from the store, so that they can be rebuilt after a kill."""

import time
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from broker_server.rounds.run_context import RunContext
from broker_server.store import RoundRecord, Store, TaskPhase, TaskRecord
from broker_server.store.privacy_spent import epsilon_by_round
from broker_server.store.queries import find_run
from broker_server.store.queries.round_views import count_bounded
from broker_server.strategies.traits import Trait
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.control import VersionEvaluation
from fleet_protocol.messages import Evaluation, TaskMetrics
from simulation.judges import Judges
from simulation.own_accuracy import (
    Hits,
    NewestHits,
    mean_accuracy,
    reported_hits,
    worst_tenth,
)
from simulation.results.rounds import DeviceRow, RoundRow
from simulation.virtual_fleet import VirtualFleet


class RowMaker:
    """Builds the rows of closed rounds.

    Args:
        context: the run.
        store: its store.
        blobs: global versions for the judges.
        fleet: the devices, with their emulated times.
        judges: additional judges of global versions.
    """

    def __init__(
        self,
        context: RunContext,
        store: Store,
        blobs: BlobStore,
        fleet: VirtualFleet,
        judges: Judges,
    ) -> None:
        self._context = context
        self._store = store
        self._blobs = blobs
        self._times = fleet.times
        self._boards = {board.id: board for board in fleet.boards}
        self._judges = judges
        self._newest = NewestHits(store, context.run)
        # The time between two processes does not belong to a round.
        self._process_began = time.time()

    def make(
        self, record: RoundRecord, before: RoundRow | None
    ) -> tuple[RoundRow, tuple[DeviceRow, ...]]:
        """Build the row of a round and those of its devices.

        Args:
            record: the round.
            before: the row of the previous closed round, None for the first. This row includes the
                cost of abandoned rounds between the two.
        """
        first = 1
        simulated_before = 0.0
        if before is not None:
            first = before.round + 1
            simulated_before = before.simulated_total
        payload_bytes = 0
        tasks: list[TaskRecord] = []
        # Rounds that were given up have no row, but devices sent and received data in them.
        for number in range(first, record.number + 1):
            tasks, round_bytes = self._counted(record.run, number)
            payload_bytes += round_bytes
        devices = []
        for task in tasks:
            # A device that was asked and did not count has no row: what it cost is in the bytes of
            # the round.
            is_merged = task.kind == "train" and task.phase is TaskPhase.MERGED
            if is_merged and task.metrics is not None:
                devices.append(self._device_row(record, task, task.metrics))
        simulated = self._simulated_seconds(record, first)
        own_hits, newest_hits = self._own_hits(record, tasks)
        losses = [row.train_loss for row in devices if row.train_loss is not None]
        epsilons = epsilon_by_round(self._store, find_run(self._store, record.run))
        clipped, too_far = count_bounded(tasks, record.number)
        row = RoundRow(
            round=record.number,
            version=record.version + 1,
            train_loss=sum(losses) / len(losses) if losses else None,
            devices=len(devices),
            tiers=Counter(row.tier for row in devices),
            simulated_seconds=simulated,
            simulated_total=simulated_before + simulated,
            seconds=self._real_seconds(record),
            payload_bytes=payload_bytes,
            local_accuracy=mean_accuracy(own_hits),
            local_worst_tenth=worst_tenth(newest_hits),
            epsilon=epsilons.get(record.number),
            clipped=clipped,
            too_far=too_far,
            **_evaluated(record.evaluation),
            **self._judged(record),
        )
        return row, tuple(devices)

    def _device_row(self, record: RoundRecord, task: TaskRecord, metrics: TaskMetrics) -> DeviceRow:
        """Return the row of a device whose update was merged."""
        local_accuracy = None
        if metrics.evaluation is not None:
            local_accuracy = metrics.evaluation.accuracy
        board = self._boards[task.device]
        seconds = self._times.round_seconds(
            board.index, task, self._context.config.train, board.examples
        )
        return DeviceRow(
            round=record.number,
            device=task.device,
            tier=task.tier,
            examples=board.examples if metrics.examples is None else metrics.examples,
            train_loss=metrics.train_loss,
            local_accuracy=local_accuracy,
            simulated_seconds=seconds,
            seconds=metrics.train_seconds,
            payload_bytes=task.update_size or 0,
        )

    def _simulated_seconds(self, record: RoundRecord, first: int) -> float:
        """Return the emulated time of a round and of those before it, from `first`."""
        rounds = [record]
        if first < record.number:
            all_rounds = self._store.rounds(record.run)
            given_up = all_rounds[first - 1 : record.number - 1]
            rounds = [*given_up, record]
        # Since Python 3.12, `sum` rounds floats differently from a loop.
        return sum(past.collect_seconds or 0.0 for past in rounds)

    def _real_seconds(self, record: RoundRecord) -> float:
        """Return the duration of a round in this process, or in the one that closed it."""
        ended = record.ended_at or record.planned_at
        began = record.planned_at
        # A round that a killed process had planned: the time in between belongs to nobody.
        if ended > self._process_began:
            began = max(self._process_began, record.planned_at)
        return max(0.0, ended - began)

    def _counted(self, run: str, number: int) -> tuple[list[TaskRecord], int]:
        """Return the tasks that count in a round, and the bytes that it sent and received.

        They include tasks of earlier rounds whose updates came late.
        """
        own_tasks = self._store.tasks(run, number)
        # Shared weights are sent once.
        sent_bytes = {task.weights.digest: task.weights.size for task in own_tasks}
        tasks = list(own_tasks)
        if not self._context.keeps(Trait.ONE_VERSION):
            tasks += self._store.late_tasks(run, number)
        counted = []
        for task in tasks:
            # With a buffer an update counts in the round whose version it is in, and only there.
            if task.screening is None or task.screening.round in {None, number}:
                counted.append(task)
        received_bytes = sum(task.update_size or 0 for task in counted)
        return counted, sum(sent_bytes.values()) + received_bytes

    def _judged(self, record: RoundRecord) -> dict[str, Any]:
        """Return the results of additional judges for the version of a round, by column."""
        if not self._judges.further or record.evaluation is None:
            return {}
        version = self._store.version(record.run, record.version + 1)
        if version is None:
            return {}
        columns = {}
        for name, judge in self._judges.further.items():
            columns[name] = judge(version, self._blobs)
        return columns

    def _own_hits(
        self, record: RoundRecord, tasks: Sequence[TaskRecord]
    ) -> tuple[Collection[Hits], Collection[Hits]]:
        """Return the results on the devices' samples: of this round, and the newest of each device.

        If the devices have parts of the test set, they are those of the global version on all
        parts, otherwise those of the devices' models on their held-out samples.
        """
        newest = self._newest.until(record.number, tasks).values()
        if self._judges.local is None or record.evaluation is None:
            return reported_hits(tasks).values(), newest
        version = self._store.version(record.run, record.version + 1)
        if version is None:
            return (), ()
        judged = self._judges.local(version, self._blobs)
        return judged, judged


def _evaluated(evaluation: VersionEvaluation | None) -> dict[str, Any]:
    """Return the columns of a row that an evaluation fills; all are None without one."""
    if evaluation is None:
        return dict.fromkeys(("accuracy", "loss"))
    return {
        "accuracy": evaluation.accuracy,
        "loss": evaluation.loss,
        "metrics": _metric_values(evaluation),
        "tier_metrics": _tier_values(evaluation),
    }


def _metric_values(evaluation: Evaluation) -> dict[str, float]:
    """Return the metrics of an evaluation by name; those without a value are left out."""
    values = {}
    for metric in evaluation.metrics:
        if metric.value is not None:
            values[metric.name] = metric.value
    return values


def _tier_values(evaluation: VersionEvaluation) -> dict[str, float] | None:
    """Return accuracy and metrics of the further tiers, by tier and name; None without tiers."""
    if not evaluation.tiers:
        return None
    values = {}
    for tier, judged in evaluation.tiers.items():
        if judged.accuracy is not None:
            values[f"{tier} accuracy"] = judged.accuracy
        for name, value in _metric_values(judged).items():
            values[f"{tier} {name}"] = value
    return values
