"""The desk of a simulation: the coordinator's tasks go to an engine instead of over MQTT, and come back as updates.

What a server checks of an update it checks here, too, and the store holds what it would hold. A device that chooses its
own tier (WHALE-FL) chooses here, with the times of its emulated clock; what it remembers for that is replayed from the
store, so a simulation that was killed goes on with the same choices.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from broker_server.collecting import Collection, OpenTask
from broker_server.desk import StopRequested
from broker_server.fleet import Fleet
from broker_server.reporting import Reporter
from broker_server.store import Store, TaskPhase, TaskRecord
from broker_server.validation import check_update
from device_runtime.adaptive import initial
from device_runtime.board import installed_backends, runtime_version
from device_runtime.sizing import SizingRecord, after_round, choose_width
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.errors import RefusalReason, RefusedError, ShoalError
from fleet_protocol.messages import DeviceStatus, Profile, Sizing, TrainSettings
from models.tier import Tier
from simulation.board_times import BoardTimes
from simulation.work import Engine, Failed, Finished, WorkItem, WorkOrder

__all__ = ["SimulationError", "VirtualBoard", "VirtualDesk"]

PATIENCE_SECONDS = 0.5


class SimulationError(ShoalError):
    """A worker could not do a task for a reason that no device has."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class VirtualBoard:
    """A virtual device.

    Attributes:
        id: its id.
        index: its number.
        examples: training samples it has.
        max_width: widest sub-model it can train.
        max_depth: deepest, None for any.
    """

    id: str
    index: int
    examples: int
    max_width: float
    max_depth: int | None

    def status(self, fleet: str) -> DeviceStatus:
        """What it would say about itself."""
        profile = Profile(
            arch="virtual",
            system="simulation",
            cores=1,
            ram_bytes=0,
            free_ram_bytes=0,
            backends={"onnx": installed_backends().get("onnx", "simulated")},
            runtime_version=runtime_version(),
            python="",
            max_width=self.max_width,
            max_depth=self.max_depth,
            examples=self.examples,
        )
        return DeviceStatus(fleet=fleet, seq=0, device=self.id, online=True, state="idle", profile=profile)


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
        taken, self._bytes = self._bytes, 0
        return taken


class VirtualDesk:
    """Asks virtual devices.

    Args:
        boards: the devices, in the order of their ids.
        engine: computes their tasks.
        times: the clocks of the devices.
        store: the run's store.
        updates: where workers put updates.
        reporter: tells about the run.
        group: tasks of one tier that a worker does together.
        stopping: set when the simulation shall stop.
    """

    def __init__(
        self,
        *,
        boards: Sequence[VirtualBoard],
        engine: Engine,
        times: BoardTimes,
        store: Store,
        updates: BlobStore,
        reporter: Reporter,
        group: int,
        stopping: threading.Event,
    ) -> None:
        self.fleet = Fleet()
        for board in boards:
            self.fleet.see(board.status("simulation"))
        self.blobs = _Counted()
        self.reporter = reporter
        self._boards = {board.id: board for board in boards}
        self._engine = engine
        self._times = times
        self._store = store
        self._updates = updates
        self._group = group
        self._stopping = stopping
        self._collection: Collection | None = None
        self._sizing: dict[str, SizingRecord] = {}
        self._replayed = 0
        self._upload_bytes = 0

    def take_upload_bytes(self) -> int:
        """Payload bytes of the updates taken since the last call."""
        taken, self._upload_bytes = self._upload_bytes, 0
        return taken

    # The coordinator's side.

    def open(self, collection: Collection) -> None:
        """Give every task that is not answered to the engine, the largest first.

        Args:
            collection: replaces the one before.
        """
        self._collection = collection
        if collection.train.sizing is not None and collection.kind == "train":
            for task in collection.unanswered:
                self._choose(task, collection.train.sizing, collection.train)
        by_tier: dict[tuple[int, str], list[WorkItem]] = {}
        for task in collection.unanswered:
            # What takes longest comes first, or one worker would end long after the others.
            by_tier.setdefault((-task.manifest.flops_per_sample, task.record.tier), []).append(
                self._item(task.record, collection.train)
            )
        orders = [
            WorkOrder(items=tuple(items[start : start + self._group]))
            for _, items in sorted(by_tier.items(), key=lambda entry: entry[0])
            for start in range(0, len(items), self._group)
        ]
        self._engine.submit(orders)

    def _item(self, record: TaskRecord, train: TrainSettings) -> WorkItem:
        return WorkItem(
            task=record.id,
            run=record.run,
            round=record.round,
            kind=record.kind,
            device=record.device,
            index=self._boards[record.device].index,
            version=record.version,
            tier=record.tier,
            artifact_set=record.artifact_set,
            weights=record.weights,
            train=train,
        )

    def close(self, reason: str) -> None:  # noqa: ARG002  (nobody is left to be told)
        """End the collection; every task of it is answered."""
        self._collection = None

    def pump(self, until: float) -> None:  # noqa: ARG002  (virtual devices always answer)
        """Wait for some results and take them.

        Raises:
            StopRequested: the simulation shall stop.
            SimulationError: a worker failed.
        """
        if self._stopping.is_set():
            raise StopRequested
        for result in self._engine.take(PATIENCE_SECONDS):
            task = self._collection.tasks.get(result.task) if self._collection is not None else None
            if task is None or task.record.phase.answered:
                continue  # it was repeated after the death of a worker
            if isinstance(result, Finished):
                self._finished(task, result)
            else:
                self._failed(task, result)

    def _finished(self, task: OpenTask, result: Finished) -> None:
        record, update = task.record, result.update
        try:
            check_update(self._updates.path(update.digest).read_bytes(), record, task.manifest, task.stays)
        except RefusedError as error:
            self._settle(task, TaskPhase.REFUSED, error.reason, str(error))
            return
        self._store.receive(record.id, update.digest, update.size, result.metrics)
        task.record = record.receiving(update, result.metrics)
        self._upload_bytes += update.size
        self.reporter.received(record, update, result.metrics, log=False)

    def _failed(self, task: OpenTask, result: Failed) -> None:
        record = task.record
        if not result.reason:
            raise SimulationError(
                f"{record.device} cannot do its task of round {record.round} ({record.tier}): {result.detail}",
                result.exit_code,
            )
        self._settle(task, TaskPhase.DECLINED, RefusalReason(result.reason), result.detail)

    def _settle(self, task: OpenTask, phase: TaskPhase, reason: RefusalReason, text: str) -> None:
        record, detail = task.record, f"{reason.value}: {text}"
        self._store.settle([record.id], phase, detail)
        task.record = replace(record, phase=phase, detail=detail)
        by_device = phase is TaskPhase.DECLINED
        self.reporter.refused(reason, text, device=record.device, number=record.round, by_device=by_device)

    # Devices that choose their tier.

    def _choose(self, task: OpenTask, sizing: Sizing, train: TrainSettings) -> None:
        record, board = task.record, self._boards[task.record.device]
        choices = {Tier.parse(choice.tier).width: choice.tier for choice in record.choices}
        self._replay(record.run, record.round, sizing)
        memory = self._sizing.get(board.id) or SizingRecord(run=record.run, state=initial(sizing.settings))
        # A board has to train its narrowest tier once to know how fast it is; METHODS 4.2 has it measured beforehand.
        narrowest = min(choices)
        seconds = self._times.step_seconds(board.index, Tier.parse(choices[narrowest]), train)
        width = choose_width(
            memory.model_copy(update={"step_seconds": {f"{narrowest:g}": seconds}}),
            sizing,
            sorted(choices),
            steps=self._times.steps(board.examples, train),
            bytes_per_second=sizing.full_bytes / self._times.full_upload_seconds(board.index),
        )
        if task.take(choices[width]):
            self._store.take(task.record)

    def _replay(self, run: str, before: int, sizing: Sizing) -> None:
        """Bring what devices remember up to a round, from the losses in the store."""
        for number in range(self._replayed + 1, before):
            for past in self._store.tasks(run, number, "train"):
                if past.metrics is None or past.metrics.mean_loss is None:
                    continue
                known = self._sizing.get(past.device) or SizingRecord(run=run, state=initial(sizing.settings))
                width, loss = Tier.parse(past.tier).width, past.metrics.mean_loss
                self._sizing[past.device] = after_round(
                    known, sizing, number=number, width=width, step_seconds=None, loss=loss
                )
            self._replayed = number
