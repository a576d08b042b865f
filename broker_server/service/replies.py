"""What devices say about their tasks: every reply is answered, counted or refused in the words of
the device.

A message counts for the task it names, and only from the device whose task that is. What belongs to
no open task is answered so that its sender stops asking.
"""

import time
from collections.abc import Mapping
from dataclasses import replace

from broker_server.rounds.collecting import OpenTask
from broker_server.service.connection import Connection, RunParts
from broker_server.store import TaskPhase, TaskRecord
from fleet_protocol import control, messages
from fleet_protocol.errors import RefusalReason, RefusedError

_NO_BLOB = messages.BlobRef(digest="0" * 64, size=1, chunk_bytes=1024)


class Replies:
    """Takes the replies of a run's devices."""

    def __init__(self, parts: RunParts, connection: Connection) -> None:
        self._parts = parts
        self._store = parts.store
        self._reporter = parts.reporter
        self._outbox = connection.outbox
        self._fleet = connection.topics.fleet
        self._asking = connection.asking

    def take(
        self,
        device: str,
        payload: bytes,
        tasks: Mapping[str, OpenTask],
        past: Mapping[str, OpenTask],
    ) -> None:
        """Take a reply about one of the open tasks, or of those that are over.

        Raises:
            RefusedError: it is malformed, foreign, or about something else than what is asked.
        """
        message = messages.parse_device_message(payload)
        task = tasks.get(message.task)
        its = (
            {name: getattr(task.record, name) for name in ("run", "round", "tier")}
            if task is not None
            else {}
        )
        message = message.told(fleet=self._fleet, device=device, **its)
        if (message.fleet, message.device) != (
            self._fleet,
            device,
        ) or not self._parts.fleet.knows(device):
            if isinstance(message, messages.Done):
                self._outbox.refuse(
                    self._as_named(message),
                    device,
                    RefusalReason.UNKNOWN_DEVICE,
                    "announce yourself",
                )
            raise RefusedError(
                RefusalReason.UNKNOWN_DEVICE,
                f"{message.type} of {message.device} in fleet {message.fleet}, sent by {device}, "
                "which has not announced itself under this name",
            )
        if isinstance(message, messages.Predicted):
            self._asking.take(message)
            return
        if isinstance(message, messages.NeedChunks):
            if task is not None:
                task.heard = time.monotonic()
            self._need(message, message.digest, task, message.ranges)
            return
        if task is None:
            self._not_open(message, past.get(message.task))
            return
        if task.record.device != device:
            if isinstance(message, messages.Done):
                self._outbox.refuse(
                    task.record,
                    device,
                    RefusalReason.UNKNOWN_DEVICE,
                    "this task is another device's",
                )
            raise RefusedError(
                RefusalReason.UNKNOWN_DEVICE,
                f"{message.type} for task {message.task} of {task.record.device}",
            )
        task.heard = time.monotonic()
        if isinstance(message, messages.Done):
            self._parts.uploads.receive_announcement(task, message)
        elif (message.run, message.round) != (task.record.run, task.record.round):
            raise RefusedError(
                RefusalReason.WRONG_ROUND,
                f"{message.type} for round {message.round}, not {task.record.round}",
            )
        else:
            self._about(task, message)

    def _need(
        self,
        message: messages.DeviceMessage,
        digest: str,
        task: OpenTask | None,
        *ranges: messages.Ranges,
    ) -> None:
        if not self._parts.blobs.need(message.device, digest, *ranges):
            reason = RefusalReason.UNKNOWN_TASK if task is None else RefusalReason.LATE
            raise RefusedError(reason, f"blob {digest[:12]} of task {message.task} is not offered")

    def _about(
        self,
        task: OpenTask,
        message: messages.Accept | messages.Progress | messages.Refuse | messages.Shares,
    ) -> None:
        record = task.record
        reporter = self._reporter
        where = reporter.stamp | {"round": record.round, "device": record.device}
        if isinstance(message, messages.Accept):
            choice = next(
                (choice for choice in record.choices if choice.tier == message.tier),
                record.choices[0],
            )
            lacks: list[str] = [getattr(choice, what).digest for what in message.lacks]
            self._parts.blobs.forget(record.device, but=lacks)
            self._parts.uploads.cohorts.receive_keys(task, message.keys)
            reporter.emit(control.DeviceAccepted(**where, kind=record.kind, tier=message.tier))
            for digest in lacks:
                self._need(message, digest, task)
        elif isinstance(message, messages.Shares):
            self._parts.uploads.cohorts.receive_shares(task, message)
        elif isinstance(message, messages.Progress):
            how_far = message.model_dump(include={"epoch", "epochs", "step", "loss"})
            reporter.emit(control.DeviceProgressed(**where, **how_far))
        elif not record.phase.answered:
            self._parts.blobs.forget(record.device)
            detail = f"{message.reason.value}: {message.detail}"
            if message.reason in {RefusalReason.NO_DATA, RefusalReason.DATA_MISMATCH}:
                again = "asked again when it has been restarted, or has other data"
                self._parts.fleet.declined[record.device] = f"declined, {detail}; {again}"
            self._store.settle([record.id], TaskPhase.DECLINED, detail)
            task.record = replace(record, phase=TaskPhase.DECLINED, detail=detail)
            self._reporter.refused(
                message.reason,
                message.detail,
                device=record.device,
                number=record.round,
                by_device=True,
            )

    def _not_open(self, message: messages.DeviceMessage, past: OpenTask | None) -> None:
        """Answer a message about a task that is over, or that never was."""
        received = (
            past is not None and past.record.phase is TaskPhase.RECEIVED
        )  # of a slow server a thousand ask twice
        known = past.record if past is not None and received else self._store.task(message.task)
        if known is not None and (known.run, known.phase) == (
            self._reporter.run,
            TaskPhase.OFFERED,
        ):
            # it goes on beyond its round, and a server that was just started has not begun the next
            return
        named = known or self._as_named(message)
        if (
            known is not None
            and known.device == message.device
            and isinstance(message, messages.Done)
        ):
            if known.phase.arrived:
                self._outbox.tell(messages.UploadAck, known)  # the first acknowledgement was lost
                return
            detail = f"round {known.round} is over"
            self._outbox.refuse(known, message.device, RefusalReason.LATE, detail)
            raise RefusedError(RefusalReason.LATE, f"update for task {message.task}: {detail}")
        if known is not None and known.device == message.device:
            self._outbox.tell(messages.Cancel, known, reason=f"round {known.round} is over")
            return
        reason = RefusalReason.UNKNOWN_TASK if known is None else RefusalReason.UNKNOWN_DEVICE
        if isinstance(message, messages.Done):
            self._outbox.refuse(
                named, message.device, reason, "there is no such task for this device"
            )
        raise RefusedError(reason, f"{message.type} for task {message.task}")

    def _as_named(self, message: messages.DeviceMessage) -> TaskRecord:
        """A task as a message names it, to answer in its words."""
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
