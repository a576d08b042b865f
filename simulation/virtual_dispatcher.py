"""The dispatcher of a simulation: tasks go to an engine instead of over MQTT, and come back as
updates.

What a server checks of an update it checks here, too, and the store holds what it would hold. A
device that chooses its own tier chooses here, with the times of its emulated clock; what it
remembers for that is replayed from the store, so a simulation that was killed goes on with the same
choices.

The clock of a round is the emulated one, and starts at 0 for every collection; who goes on beyond a
round has so much of its time behind it. Where nobody can be missing, an answer is taken as soon as
it is computed. Where devices drop out, more are asked than wanted, or there is a deadline, it
matters who comes first: then all answers are computed before the first is taken, and they are taken
in the order of emulated time.
"""

import heapq
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from broker_server.rounds.accounting import ByteCount
from broker_server.rounds.collecting import Cohort, Collection, OpenTask
from broker_server.rounds.fleet import Fleet
from broker_server.rounds.reporting import Reporter
from broker_server.rounds.stopping import OperatorWish, StopRequested
from broker_server.store import Store, TaskPhase, TaskRecord
from broker_server.updates.intake import MOST_SENT, receive_update
from device_runtime.training.choosers import Situation, TierChooser, chooser_of
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.encodings import open_weights
from fleet_protocol.errors import RefusalReason, RefusedError, ShoalError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages import Instructions, TrainSettings
from fleet_protocol.secure_sum import Words
from fleet_protocol.weights import MASKED
from models.tier import Tier
from simulation.orders import Engine, Failed, Finished, WorkItem, WorkOrder
from simulation.settings import NO_DEADLINE
from simulation.virtual_fleet import VirtualFleet

PATIENCE_SECONDS = 0.5
_COMMIT_SECONDS = 1.0  # a killed simulation computes again what it was given in less than this


class SimulationError(ShoalError):
    """A worker could not do a task for a reason that no device has."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Records:
    """Where the tasks of a run and their updates are written down.

    `blobs` has the weights that devices are sent.
    """

    store: Store
    blobs: BlobStore
    updates: BlobStore
    reporter: Reporter


class _Counted:
    """Counts what a server would send: every blob once."""

    def __init__(self) -> None:
        self._served: set[str] = set()
        self._bytes = 0

    def serve(self, files: Mapping[str, Path]) -> None:
        for digest, path in files.items():
            if digest not in self._served:
                self._served.add(digest)
                self._bytes += path.stat().st_size

    def withdraw(self, digests: Iterable[str]) -> None:
        self._served.difference_update(digests)

    def take_payload_bytes(self) -> int:
        taken = self._bytes
        self._bytes = 0
        return taken


class VirtualDispatcher:
    """Asks virtual devices; `group` tasks of one tier are given to a worker together."""

    def __init__(
        self,
        fleet: VirtualFleet,
        engine: Engine,
        records: Records,
        *,
        group: int,
        stopping: threading.Event,
    ) -> None:
        self.settling_seconds = 0.0
        self.operator = OperatorWish()
        self.fleet = Fleet()
        for board in fleet.boards:
            self.fleet.receive(board.profile())
            self.fleet.receive(board.status())
        self.blobs = _Counted()
        self.reporter = records.reporter
        self._boards = {board.id: board for board in fleet.boards}
        self._engine = engine
        self._times = fleet.times
        self._records = records
        self._sent = lru_cache(MOST_SENT)(lambda digest: open_weights(records.blobs.path(digest)))
        self._group = group
        self._stopping = stopping
        self._collection: Collection | None = None
        self._memories: dict[str, FrozenModel] = {}
        self._replayed = 0
        self._upload_bytes = 0
        self._now = self._committed = 0.0
        self._computing: set[str] = set()
        self._in_order = False
        self._took: dict[int, float] = {}  # by round
        self._waiting: dict[
            str, Finished | Failed
        ] = {}  # results of tasks that go on beyond a round
        # Times with what happens then: the result of a device, or its leaving. A device has one
        # entry.
        self._ahead: list[tuple[float, str, Finished | Failed | None]] = []

    def now(self) -> float:
        """Emulated seconds since the collection in progress began."""
        return self._now

    def count_bytes(self) -> ByteCount:
        """Payload bytes since the last call: blobs that were served, updates that were taken.

        There is no wire.
        """
        taken = self._upload_bytes
        self._upload_bytes = 0
        return ByteCount(wire=0, payload=self.blobs.take_payload_bytes() + taken)

    def forget(self, task: str) -> None:
        """Drop what came of a task that is over: virtual devices' updates come whole, so there is
        nothing.
        """

    # The coordinator's side.

    def open(self, collection: Collection) -> None:
        """Give every task that is not answered to the engine, the largest first.

        Forgets the collection before.
        """
        self._collection = collection
        self._sent.cache_clear()
        for task in collection.unanswered:
            if (chooser := chooser_of(task.instructions)) is not None:
                self._choose(task, chooser, task.instructions.train)
        self._schedule(collection)
        by_tier: dict[tuple[int, str], list[WorkItem]] = {}
        for task in collection.unanswered:
            if task.record.id not in self._computing:
                continue
            # What takes longest comes first, or one worker would end long after the others.
            place = -task.manifest.flops_per_sample, task.record.tier
            by_tier.setdefault(place, []).append(self._item(task.record, task.instructions))
        orders = [
            WorkOrder(items=tuple(items[start : start + self._group]))
            for _, items in sorted(by_tier.items(), key=lambda entry: entry[0])
            for start in range(0, len(items), self._group)
        ]
        self._engine.submit(orders)

    def _schedule(self, collection: Collection) -> None:
        """Find out who drops out and when, and whether the order of the answers matters."""
        rule = collection.rule
        self._computing = set()
        self._ahead = []
        self._took = {}
        if collection.kind == "train":
            oldest = min(
                (task.record.round for task in collection.tasks.values()),
                default=collection.number,
            )
            since = self._records.store.rounds(
                self.reporter.run, last=collection.number - oldest + 1
            )
            self._took = {past.number: past.collect_seconds or 0.0 for past in since}
        for task in collection.tasks.values():
            record = task.record
            board = self._boards[task.record.device]
            if record.phase.answered:  # before the simulation was stopped
                task.answered = self._seconds(record, task)
                self._now = max(self._now, task.answered)
                continue
            leaving = record.kind == "train" and record.round == collection.number
            share = board.leaves(task.instructions.train.seed, record.round) if leaving else None
            if share is not None:
                heapq.heappush(self._ahead, (share * self._seconds(record, task), board.id, None))
            elif record.id in self._waiting:
                self._in_order = True
                self._computed(collection, self._waiting.pop(record.id))
            else:
                self._computing.add(record.id)
        asked_more = rule.wanted < len(collection.tasks)
        self._in_order = (
            bool(self._ahead) or asked_more or rule.deadline - rule.opened < NO_DEADLINE
        )

    def _seconds(self, record: TaskRecord, task: OpenTask) -> float:
        """When the answer to a task comes; to ask for statistics takes no time."""
        if record.kind != "train":
            return 0.0
        board = self._boards[record.device]
        whole = self._times.round_seconds(
            board.index, record, task.instructions.train, board.examples
        )
        worked = sum(took for number, took in self._took.items() if number >= record.round)
        left = (
            board.leaves(task.instructions.train.seed, record.round)
            if record.round in self._took
            else None
        )
        if left is not None and record.round < max(
            self._took
        ):  # in that round, and was back with the next
            worked -= max(0.0, self._took[record.round] - left * whole)
        return max(0.0, whole - worked)

    def _item(self, record: TaskRecord, instructions: Instructions) -> WorkItem:
        return WorkItem(
            task=record.id,
            run=record.run,
            round=record.round,
            device=record.device,
            index=self._boards[record.device].index,
            version=record.version,
            tier=record.tier,
            artifact_set=record.artifact_set,
            weights=record.weights,
            instructions=instructions,
        )

    def total(self, cohort: Cohort) -> Words:
        """Add up what has no masks here, as they cancel to the bit.

        Everybody who was asked counts as having dealt.
        """
        came = [str(task.record.update_digest) for task in cohort.received]
        cohort.require(len(came), len(cohort.tasks))
        vectors = (self._records.updates.tensors(digest)[MASKED] for digest in came)
        total: Words = sum(vectors, np.zeros((), np.uint32))
        return total

    def close(self, reason: str, *, waits: bool = False) -> None:  # noqa: ARG002  (nobody is left to be told)
        """End the collection: answers that would come later are kept for later or dropped, and who
        left is back.
        """
        for _, device, result in self._ahead:
            if result is not None and waits:
                self._waiting[result.task] = result
            elif isinstance(result, Finished):
                self._records.updates.remove(result.update.digest)
            self.fleet.receive(self._boards[device].status())
        for task in self._collection.tasks.values() if self._collection is not None else ():
            self.fleet.receive(self._boards[task.record.device].status())
        self._collection, self._computing, self._ahead, self._now = None, set(), [], 0.0

    @property
    def stopping(self) -> bool:
        """Whether the simulation should stop."""
        return self._stopping.is_set()

    def pump(self, until: float) -> None:
        """Wait for some results, or go on to what happens next.

        Raises:
            StopRequested: the simulation shall stop.
            SimulationError: a worker failed.
        """
        if self.stopping:
            raise StopRequested
        if self._collection is not None and self._computing:
            for result in self._engine.take(PATIENCE_SECONDS):
                if (
                    result.task in self._computing
                ):  # else it was repeated after the death of a worker
                    self._computing.discard(result.task)
                    self._computed(self._collection, result)
            if time.monotonic() - self._committed > _COMMIT_SECONDS:
                self._records.store.flush()
                self._committed = time.monotonic()
        elif self._collection is not None and self._ahead and self._ahead[0][0] <= until:
            at, device, happening = heapq.heappop(self._ahead)
            self._now = max(self._now, at)
            if happening is None:
                self.fleet.receive(self._boards[device].status(online=False))
                for task in self._collection.unanswered_of(device):
                    # which is past where a simulation goes on whose later answers are stored
                    task.left = at
            else:
                self._take(self._collection.tasks[happening.task], happening)
        elif (
            self._collection is not None and until >= NO_DEADLINE
        ):  # who left is away until the end of the round
            for task in self._collection.unanswered:
                task.record = replace(task.record, phase=TaskPhase.MISSED)
        else:
            self._now = max(self._now, until)

    def _computed(self, collection: Collection, result: Finished | Failed) -> None:
        task = collection.tasks[result.task]
        record = task.record
        if isinstance(result, Failed) and not result.reason:
            raise SimulationError(
                f"{record.device} cannot do its task of round {record.round} ({record.tier}): {result.detail}",
                result.exit_code,
            )
        if isinstance(result, Finished):
            record = record.with_update(result.update.digest, result.update.size, result.metrics)
        at = self._seconds(record, task)
        if self._in_order:
            heapq.heappush(self._ahead, (at, record.device, result))
            return
        self._now = max(self._now, at)
        task.answered = at
        self._take(task, result)

    def _take(self, task: OpenTask, result: Finished | Failed) -> None:
        if isinstance(result, Finished):
            self._finished(task, result)
        else:
            self._settle(task, TaskPhase.DECLINED, RefusalReason(result.reason), result.detail)

    def _finished(self, task: OpenTask, result: Finished) -> None:
        record = task.record
        update = result.update
        updates = self._records.updates
        data = updates.path(update.digest).read_bytes()
        merged = update.digest
        try:
            arrived = receive_update(data, task.expected, self._sent)
        except RefusedError as error:
            updates.remove(merged)
            self._settle(task, TaskPhase.REFUSED, error.reason, str(error))
            return
        if arrived.data is not data:
            updates.remove(merged)
            merged = updates.put(arrived.data)
        task.distance = arrived.distance
        task.record = record.with_update(merged, update.size, result.metrics)
        self._records.store.receive([task.record], later=True)
        self._upload_bytes += update.size
        self.reporter.received(record, update, result.metrics, log=False)

    def _settle(self, task: OpenTask, phase: TaskPhase, reason: RefusalReason, text: str) -> None:
        record = task.record
        detail = f"{reason.value}: {text}"
        self._records.store.settle([record.id], phase, detail)
        task.record = replace(record, phase=phase, detail=detail)
        by_device = phase is TaskPhase.DECLINED
        self.reporter.refused(
            reason, text, device=record.device, number=record.round, by_device=by_device
        )

    # Devices that choose their tier.

    def _choose(self, task: OpenTask, chooser: TierChooser, train: TrainSettings) -> None:
        record = task.record
        board = self._boards[task.record.device]
        times = self._times
        self._replay(record.run, record.round, chooser)
        tiers = tuple(choice.tier for choice in record.choices)
        narrowest = min(map(Tier.parse, tiers))
        situation = Situation(
            tiers=tiers,
            steps=train.steps_for(board.examples),
            bytes_per_second=times.bytes_per_second(board.index, record.round),
            step_seconds=times.step_seconds(board.index, record.round, narrowest, train),
        )
        if task.choose_tier(chooser.choose(self._memories.get(board.id), situation)):
            self._records.store.choose_tier(task.record)

    def _replay(self, run: str, before: int, chooser: TierChooser) -> None:
        """Bring what devices remember up to a round, from the losses in the store."""
        for number in range(self._replayed + 1, before):
            for past in self._records.store.tasks(run, number, "train"):
                if past.metrics is None or past.metrics.mean_loss is None:
                    continue
                known = self._memories.get(past.device)
                self._memories[past.device] = chooser.learn(known, number, past.metrics.mean_loss)
            self._replayed = number
