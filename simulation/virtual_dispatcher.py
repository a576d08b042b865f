"""The dispatcher of a simulation, which sends tasks to an engine instead of over MQTT.

The same intake as on a server checks updates, and the store gets the same content. Devices that
choose their tier do so here.

A round uses the emulated clock, which starts at 0 for every collection. If no device can be
missing, an update is accepted as soon as it is computed. If devices drop out, if more devices are
selected than needed, or if there is a deadline, the order of updates matters: then all are computed
first and accepted in the order of emulated time.
"""

import heapq
import threading
import time
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from broker_server.rounds.accounting import ByteCount
from broker_server.rounds.collecting import Cohort, CohortSum, Collection, OpenTask
from broker_server.rounds.dispatch import RunStorage
from broker_server.rounds.fleet import Fleet
from broker_server.rounds.reporting import Reporter
from broker_server.rounds.stopping import OperatorWish, StopRequested
from broker_server.stages.update import Tensors
from broker_server.store import TaskPhase
from broker_server.updates.intake import MOST_SENT, receive_update
from fleet_protocol.encodings import open_weights
from fleet_protocol.errors import RefusalReason, RefusedError, ShoalError
from fleet_protocol.secure_sum import Words
from fleet_protocol.weights import MASKED
from simulation.answer_times import AnswerTimes
from simulation.blob_counter import BlobCounter
from simulation.orders import DeviceTask, Engine, Failed, Finished, WorkOrder
from simulation.settings import NO_DEADLINE
from simulation.tier_choices import TierChoices
from simulation.virtual_fleet import VirtualFleet

PATIENCE_SECONDS = 0.5
_COMMIT_SECONDS = 1.0  # a killed simulation recomputes updates received within this time

Result = Finished | Failed


class _Event(NamedTuple):
    """The next event of a device in a round.

    Events are ordered by time, and simultaneous ones by device. A device has at most one event, so
    results are never compared.

    Attributes:
        moment: seconds on the emulated clock.
        device: its id.
        result: result of its task; None if it leaves.
    """

    moment: float
    device: str
    result: Result | None


class SimulationError(ShoalError):
    """A worker failed for a reason other than the device."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class VirtualDispatcher:
    """Dispatches tasks to virtual devices, as a `broker_server.rounds.dispatch.Dispatcher`."""

    def __init__(  # noqa: PLR0913  (options by keyword)
        self,
        fleet: VirtualFleet,
        engine: Engine,
        storage: RunStorage,
        reporter: Reporter,
        *,
        group: int,
        stopping: threading.Event,
    ) -> None:
        """Announce all devices.

        Args:
            fleet: the devices.
            engine: computes their tasks.
            storage: storage of tasks and updates.
            reporter: reporter of the run.
            group: number of tasks of one tier in an order.
            stopping: set when the simulation should stop.
        """
        # Nobody has to come back: virtual devices are there from the first moment.
        self.settling_seconds = 0.0
        self.operator = OperatorWish()
        self.fleet = Fleet()
        for board in fleet.boards:
            self.fleet.receive(board.profile())
            self.fleet.receive(board.status())
        self.blobs = BlobCounter()
        self.reporter = reporter
        self._boards = {board.id: board for board in fleet.boards}
        self._engine = engine
        self._storage = storage
        self._group = group
        self._stopping = stopping
        self._tier_choices = TierChoices(storage.store, self._boards, fleet.times)
        self._answer_times = AnswerTimes(self._boards, fleet.times)
        self._sent = lru_cache(MOST_SENT)(self._read_sent)
        self._collection: Collection | None = None
        self._upload_bytes = 0
        self._now = 0.0
        self._committed = 0.0
        self._computing: set[str] = set()
        self._in_order = False
        self._waiting: dict[str, Result] = {}  # tasks that continue beyond a round
        self._ahead: list[_Event] = []  # a heap

    def _read_sent(self, digest: str) -> Tensors:
        return open_weights(self._storage.blobs.path(digest))

    def now(self) -> float:
        """Return the emulated seconds since the collection in progress began."""
        return self._now

    def count_bytes(self) -> ByteCount:
        """Return the payload since the last call: blobs served, updates received; no wire."""
        payload = self.blobs.reset() + self._upload_bytes
        self._upload_bytes = 0
        return ByteCount(wire=0, payload=payload)

    def forget(self, task: str) -> None:
        """Do nothing: virtual updates are always complete."""

    # The coordinator's side.

    def open(self, collection: Collection) -> None:
        """Send every unanswered task to the engine, and drop the previous collection."""
        self._collection = collection
        self._sent.cache_clear()
        # Before anything is computed, as a board chooses before it trains.
        for task in collection.unanswered:
            self._tier_choices.choose(task)
        self._schedule(collection)
        self._engine.submit(self._orders(collection))

    def _schedule(self, collection: Collection) -> None:
        """Determine which devices drop out and when, and whether the order of updates matters."""
        rule = collection.rule
        self._computing = set()
        self._ahead = []
        self._answer_times.begin(collection, self._storage.store, self.reporter.run)
        for task in collection.tasks.values():
            record = task.record
            if record.phase.answered:
                # It answered before the simulation stopped.
                task.answered = self._answer_times.seconds(task)
                self._now = max(self._now, task.answered)
                continue
            may_leave = record.kind == "train" and record.round == collection.number
            share = self._answer_times.leaving_share(task) if may_leave else None
            if share is not None:
                moment = share * self._answer_times.seconds(task)
                heapq.heappush(self._ahead, _Event(moment, record.device, None))
            elif record.id in self._waiting:
                # A delayed update arrives at its own emulated time, among the others.
                self._in_order = True
                self._finish_computing(collection, self._waiting.pop(record.id))
            else:
                self._computing.add(record.id)
        # Where all are waited for without a deadline, the order of answers changes nothing, and
        # none is kept.
        more_asked = rule.wanted < len(collection.tasks)
        ends_by_time = rule.deadline - rule.opened < NO_DEADLINE
        self._in_order = bool(self._ahead) or more_asked or ends_by_time

    def _orders(self, collection: Collection) -> list[WorkOrder]:
        """Return the tasks to compute, those of a tier in groups, the largest tier first."""
        by_size: dict[tuple[int, str], list[DeviceTask]] = {}
        for task in collection.unanswered:
            if task.record.id in self._computing:
                # A large last task would keep one worker busy after the others have finished.
                place = (-task.manifest.flops_per_sample, task.record.tier)
                by_size.setdefault(place, []).append(self._device_task(task))
        orders = []
        for place in sorted(by_size):
            tasks = by_size[place]
            for start in range(0, len(tasks), self._group):
                group = tasks[start : start + self._group]
                orders.append(WorkOrder(tasks=tuple(group)))
        return orders

    def _device_task(self, task: OpenTask) -> DeviceTask:
        record = task.record
        return DeviceTask(
            id=record.id,
            run=record.run,
            round=record.round,
            device=record.device,
            index=self._boards[record.device].index,
            version=record.version,
            tier=record.tier,
            artifact_set=record.artifact_set,
            weights=record.weights,
            instructions=task.instructions,
        )

    @property
    def has_begun_sums(self) -> bool:
        """Return that no sum is pending, because there are no masks."""
        return False

    def sum_obstacle(self, cohort: Cohort) -> str:
        """Return why the sum of a cohort cannot be computed; empty if it can."""
        try:
            cohort.require(len(cohort.received), len(cohort.tasks))
        except RefusedError as error:
            return str(error)
        return ""

    def total(self, cohort: Cohort) -> CohortSum:
        """Return the sum of a cohort's integers without masks, because masks cancel exactly.

        All selected devices count as having sent shares.
        """
        digests = [str(task.record.update_digest) for task in cohort.received]
        cohort.require(len(digests), len(cohort.tasks))
        total: Words = np.zeros((), np.uint32)
        for digest in digests:
            tensors = self._storage.updates.tensors(digest)
            # Integers modulo 2^32, so that the order of devices does not matter.
            total = total + tensors[MASKED]
        return CohortSum(total, cohort.received)

    def close(self, reason: str, *, waits: bool = False) -> None:  # noqa: ARG002
        """End the collection; devices that left are back.

        Args:
            reason: reason for devices that are still working.
            waits: whether later updates are kept for later rounds, or dropped.
        """
        for event in self._ahead:
            result = event.result
            if result is not None and waits:
                self._waiting[result.task] = result
            elif isinstance(result, Finished):
                self._storage.updates.remove(result.update.digest)
            self._announce(event.device)
        if self._collection is not None:
            for task in self._collection.tasks.values():
                self._announce(task.record.device)
        self._collection = None
        self._computing = set()
        self._ahead = []
        self._now = 0.0

    def _announce(self, device: str, *, online: bool = True) -> None:
        """Report that a device is online, or has left."""
        board = self._boards[device]
        self.fleet.receive(board.status(online=online))

    @property
    def stopping(self) -> bool:
        """Return whether the simulation should stop."""
        return self._stopping.is_set()

    def pump(self, until: float) -> None:
        """Wait for results, or advance to the next event.

        Raises:
            StopRequested: the simulation has to stop.
            SimulationError: a worker failed.
        """
        if self.stopping:
            raise StopRequested
        collection = self._collection
        if collection is not None and self._computing:
            self._receive_results(collection)
        elif collection is not None and self._ahead and self._ahead[0].moment <= until:
            self._go_on(collection)
        elif collection is not None and until >= NO_DEADLINE:
            # Devices that left are offline until the end of the round.
            for task in collection.unanswered:
                task.record = replace(task.record, phase=TaskPhase.MISSED)
        else:
            self._now = max(self._now, until)

    def _receive_results(self, collection: Collection) -> None:
        for result in self._engine.receive(PATIENCE_SECONDS):
            # After the death of a worker, a result may arrive twice.
            if result.task in self._computing:
                self._computing.discard(result.task)
                self._finish_computing(collection, result)
        if time.monotonic() - self._committed > _COMMIT_SECONDS:
            self._storage.store.flush()
            self._committed = time.monotonic()

    def _go_on(self, collection: Collection) -> None:
        """Process the next event: a device leaves, or its result arrives."""
        event = heapq.heappop(self._ahead)
        self._now = max(self._now, event.moment)
        result = event.result
        if result is not None:
            self._receive(collection.tasks[result.task], result)
            return
        self._announce(event.device, online=False)
        for task in collection.unanswered_of(event.device):
            # A resumed simulation starts at its latest stored update, which is later.
            task.left = event.moment

    def _finish_computing(self, collection: Collection, result: Result) -> None:
        """Accept a result immediately, or queue it by time."""
        task = collection.tasks[result.task]
        record = task.record
        if isinstance(result, Failed) and not result.reason:
            raise SimulationError(
                f"device {record.device} failed in round {record.round} ({record.tier}):"
                f" {result.detail}",
                result.exit_code,
            )
        moment = self._seconds_with(task, result)
        if self._in_order:
            heapq.heappush(self._ahead, _Event(moment, record.device, result))
            return
        self._now = max(self._now, moment)
        task.answered = moment
        self._receive(task, result)

    def _seconds_with(self, task: OpenTask, result: Result) -> float:
        """Return the arrival time of a result, which depends on the size of the update."""
        if isinstance(result, Failed):
            return self._answer_times.seconds(task)
        size = result.update.size
        record = task.record.with_update(result.update.digest, size, result.metrics)
        return self._answer_times.seconds(replace(task, record=record))

    def _receive(self, task: OpenTask, result: Result) -> None:
        if isinstance(result, Finished):
            self._receive_update(task, result)
        else:
            reason = RefusalReason(result.reason)
            self._settle(task, TaskPhase.DECLINED, reason, result.detail)

    def _receive_update(self, task: OpenTask, result: Finished) -> None:
        update = result.update
        updates = self._storage.updates
        data = updates.path(update.digest).read_bytes()
        digest = update.digest
        try:
            arrived = receive_update(data, task.expected, self._sent)
        except RefusedError as error:
            updates.remove(digest)
            self._settle(task, TaskPhase.REFUSED, error.reason, str(error))
            return
        if arrived.data is not data:  # it was decoded
            updates.remove(digest)
            digest = updates.put(arrived.data)
        before = task.record
        task.distance = arrived.distance
        metrics = self._tier_choices.reported(before.device, result.metrics)
        task.record = before.with_update(digest, update.size, metrics)
        self._storage.store.receive([task.record], later=True)
        self._upload_bytes += update.size
        self.reporter.received(before, update, metrics, log=False)

    def _settle(
        self,
        task: OpenTask,
        phase: TaskPhase,
        reason: RefusalReason,
        text: str,
    ) -> None:
        record = task.record
        detail = f"{reason.value}: {text}"
        self._storage.store.settle([record.id], phase, detail)
        task.record = replace(record, phase=phase, detail=detail)
        by_device = phase is TaskPhase.DECLINED
        self.reporter.refused(
            reason, text, device=record.device, number=record.round, by_device=by_device
        )
