"""Handles the devices' replies about their tasks: every reply is answered, counted or refused.

A message counts for the task that it names, and only from the device that owns the task. A message
about no open task is answered so that its sender stops repeating it.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

from broker_server.rounds.collecting import OpenTask
from broker_server.service.clocks import Clocks
from broker_server.service.connection import Connection, RunServices
from broker_server.store import TaskPhase, TaskRecord
from broker_server.store.task_records import Alternative
from fleet_protocol import control
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.messages import (
    Accept,
    BlobRef,
    Cancel,
    DeviceMessage,
    Done,
    NeedChunks,
    Predicted,
    Progress,
    Ranges,
    Refuse,
    Shares,
    UploadAck,
    parse_device_message,
)

_NO_BLOB = BlobRef(digest="0" * 64, size=1, chunk_bytes=1024)
_OF_BROKER = (RefusalReason.REFUSED_BY_BROKER, RefusalReason.TOO_LARGE_FOR_BROKER)
"""Refusals that last until somebody changes the broker's settings."""
BARRED_SECONDS = 3600.0
"""Time for which a device is not selected after the broker has refused it something."""
BARRED = "requested again in an hour, or in the next run"
_ASKED_AGAIN = "requested again when it has been restarted, or has other data"


class Replies:
    """The replies of the devices of a run."""

    def __init__(self, services: RunServices, connection: Connection) -> None:
        self._devices = services.fleet
        self._blobs = services.blobs
        self._uploads = services.uploads
        self._store = services.store
        self._reporter = services.reporter
        self._outbox = connection.outbox
        self._fleet = connection.topics.fleet
        self._predictions = connection.predictions
        self._clocks = Clocks(services.reporter)

    def receive(
        self,
        device: str,
        payload: bytes,
        tasks: Mapping[str, OpenTask],
        past: Mapping[str, OpenTask],
    ) -> None:
        """Handle a reply.

        Args:
            device: on whose topic it arrived.
            payload: the reply as received.
            tasks: the open tasks, by id.
            past: tasks that are over, by id.

        Raises:
            RefusedError: it is malformed, from another device, or does not match the request.
        """
        message = parse_device_message(payload)
        task = tasks.get(message.task)
        # Before any check, because boards leave out what the topic or the task says.
        message = self._complete(message, device, task)
        self._require_sender(message, device)
        if isinstance(message, Predicted):
            self._predictions.receive(message)
        elif isinstance(message, NeedChunks):
            # A request for chunks shows that the device works on its task.
            if task is not None:
                task.heard = time.monotonic()
            self._serve(message, message.digest, task, message.ranges)
        elif task is None:
            self._answer_not_open(message, past.get(message.task))
        else:
            self._receive_about(task, message, device)

    def _complete(
        self, message: DeviceMessage, device: str, task: OpenTask | None
    ) -> DeviceMessage:
        """Return a message with the fields that its device left out: topic and task imply them."""
        fields: dict[str, object] = {"fleet": self._fleet, "device": device}
        if task is not None:
            record = task.record
            fields |= {"run": record.run, "round": record.round, "tier": record.tier}
        return message.completed(**fields)

    def _require_sender(self, message: DeviceMessage, device: str) -> None:
        own = (message.fleet, message.device) == (self._fleet, device)
        # The profile says what the device can train; without it no answer would make sense.
        if own and self._devices.knows(device):
            return
        self._refuse_done(
            message,
            self._record_as_named(message),
            device,
            RefusalReason.UNKNOWN_DEVICE,
            "send your profile",
        )
        raise RefusedError(
            RefusalReason.UNKNOWN_DEVICE,
            f"{message.type} of {message.device} in fleet {message.fleet}, sent by {device}, "
            "which has not announced itself under this name",
        )

    def _refuse_done(
        self,
        message: DeviceMessage,
        record: TaskRecord,
        device: str,
        reason: RefusalReason,
        detail: str,
    ) -> None:
        """Answer the announcement of an update, which its device repeats until it is answered."""
        if isinstance(message, Done):
            self._outbox.refuse(record, device, reason, detail)

    def _receive_about(
        self,
        task: OpenTask,
        message: Accept | Done | Progress | Refuse | Shares,
        device: str,
    ) -> None:
        record = task.record
        if record.device != device:
            self._refuse_done(
                message,
                record,
                device,
                RefusalReason.UNKNOWN_DEVICE,
                "this task belongs to another device",
            )
            raise RefusedError(
                RefusalReason.UNKNOWN_DEVICE,
                f"{message.type} for task {message.task} of {record.device}",
            )
        task.heard = time.monotonic()
        if isinstance(
            message, Done
        ):  # for another round, too: that is answered and not only counted
            self._uploads.receive_announcement(task, message)
            return
        if (message.run, message.round) != (record.run, record.round):
            raise RefusedError(
                RefusalReason.WRONG_ROUND,
                f"{message.type} for round {message.round}, not {record.round}",
            )
        match message:
            case Accept():
                self._note_acceptance(task, message)
            case Shares():
                self._uploads.cohorts.receive_shares(task, message)
            case Progress():
                self._note_progress(task, message)
            case Refuse():
                self._note_refusal(task, message)

    def _serve(
        self, message: DeviceMessage, digest: str, task: OpenTask | None, *ranges: Ranges
    ) -> None:
        if not self._blobs.request(message.device, digest, *ranges):
            reason = RefusalReason.UNKNOWN_TASK if task is None else RefusalReason.LATE
            raise RefusedError(reason, f"blob {digest[:12]} of task {message.task} is not offered")

    def _note_acceptance(self, task: OpenTask, message: Accept) -> None:
        record = task.record
        self._clocks.check(record.device, record.round, message.clock, task.offered)
        choice = self._accepted_choice(record, message.tier)
        # A restarted device may lack less than before, or more.
        lacking: list[str] = [getattr(choice, name).digest for name in message.lacks]
        self._blobs.forget(record.device, but=lacking)
        self._uploads.cohorts.receive_keys(task, message.keys)
        accepted = control.DeviceAccepted(
            **self._stamp(record), kind=record.kind, tier=message.tier
        )
        self._reporter.emit(accepted)
        for digest in lacking:
            self._serve(message, digest, task)

    def _accepted_choice(self, record: TaskRecord, tier: str) -> Alternative:
        for choice in record.choices:
            if choice.tier == tier:
                return choice
        offered = ", ".join(choice.tier for choice in record.choices)
        raise RefusedError(
            RefusalReason.UNSUPPORTED, f"task {record.id} was offered as {offered}, not {tier}"
        )

    def _note_progress(self, task: OpenTask, message: Progress) -> None:
        progress = message.model_dump(include={"epoch", "epochs", "step", "loss"})
        self._reporter.emit(control.DeviceProgressed(**self._stamp(task.record), **progress))

    def _note_refusal(self, task: OpenTask, message: Refuse) -> None:
        record = task.record
        if record.phase.answered:
            return
        self._blobs.forget(record.device)  # it fetches nothing more for this task
        detail = f"{message.reason.value}: {message.detail}"
        if message.reason in {RefusalReason.NO_DATA, RefusalReason.DATA_MISMATCH}:
            self._devices.declined[record.device] = f"declined, {detail}; {_ASKED_AGAIN}"
        elif message.reason in _OF_BROKER:
            self._devices.bar(record.device, f"declined, {detail}; {BARRED}", BARRED_SECONDS)
        # Stored before the round counts it as answered.
        self._store.settle([record.id], TaskPhase.DECLINED, detail)
        task.record = replace(record, phase=TaskPhase.DECLINED, detail=detail)
        self._reporter.refused(
            message.reason,
            message.detail,
            device=record.device,
            number=record.round,
            by_device=True,
        )

    def _stamp(self, record: TaskRecord) -> dict[str, Any]:
        return self._reporter.stamp | {"round": record.round, "device": record.device}

    def _answer_not_open(self, message: DeviceMessage, past: OpenTask | None) -> None:
        """Answer a message about a task that is over, or that never existed."""
        record = self._past_record(message, past)
        if record is None:
            self._refuse_foreign(message, None, RefusalReason.UNKNOWN_TASK)
        if (record.run, record.phase) == (self._reporter.run, TaskPhase.OFFERED):
            # It continues beyond its round, and a restarted server has not begun the next one.
            return
        if record.device != message.device:
            self._refuse_foreign(message, record, RefusalReason.UNKNOWN_DEVICE)
        detail = f"round {record.round} is over"
        if not isinstance(message, Done):
            self._outbox.send_about(Cancel, record, reason=detail)
        elif record.phase.arrived:
            self._outbox.send_about(UploadAck, record)  # the first acknowledgement was lost
        else:
            # Answered first, then counted: a device without an answer repeats its announcement.
            self._outbox.refuse(record, message.device, RefusalReason.LATE, detail)
            raise RefusedError(RefusalReason.LATE, f"update for task {message.task}: {detail}")

    def _past_record(self, message: DeviceMessage, past: OpenTask | None) -> TaskRecord | None:
        # The record in memory saves a query: with a slow server a thousand devices ask twice.
        if past is not None and past.record.phase is TaskPhase.RECEIVED:
            return past.record
        return self._store.task(message.task)

    def _refuse_foreign(
        self, message: DeviceMessage, record: TaskRecord | None, reason: RefusalReason
    ) -> NoReturn:
        self._refuse_done(
            message,
            record or self._record_as_named(message),
            message.device,
            reason,
            "this device has no such task",
        )
        raise RefusedError(reason, f"{message.type} for task {message.task}")

    def _record_as_named(self, message: DeviceMessage) -> TaskRecord:
        """Return a record with the ids in a message, to answer with the same ids."""
        return TaskRecord(
            id=message.task,
            run=message.run,
            round=message.round,
            device=message.device,
            kind="train",
            tier="",
            plan_key="",
            version=0,
            artifact_set=_NO_BLOB,
            weights=_NO_BLOB,
        )
