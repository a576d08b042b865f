"""Everything the server says on MQTT, as typed messages with a running number."""

import contextlib
import itertools
from collections.abc import Mapping

from broker_server.store import TaskRecord
from fleet_protocol.control import RunEvent
from fleet_protocol.errors import RefusalReason, TransportError
from fleet_protocol.messages import (
    Cancel,
    Instructions,
    Offer,
    Ranges,
    ServerMessage,
    ServerStatus,
    Sum,
    TierChoice,
    UploadAck,
    UploadMissing,
    UploadRefused,
)
from fleet_protocol.topics import Topics
from fleet_protocol.transport import Transport


class Outbox:
    """Sends the server's messages.

    A message that paho cannot take is dropped: every exchange of the protocol is repeated by whoever waits for it.
    """

    def __init__(self, link: Transport, topics: Topics) -> None:
        self._link = link
        self._topics = topics
        self._numbers = itertools.count(1)

    def _send(self, device: str, message: ServerMessage) -> None:
        with contextlib.suppress(TransportError):
            self._link.publish(self._topics.task(device), message.to_bytes())

    def _head(self, task: TaskRecord) -> dict[str, object]:
        return {
            "fleet": self._topics.fleet,
            "seq": next(self._numbers),
            "run": task.run,
            "round": task.round,
            "task": task.id,
        }

    def status(self, run: str | None) -> None:
        """Say, retained, that the server is here, and with which run."""
        message = ServerStatus(fleet=self._topics.fleet, seq=next(self._numbers), online=True, run=run)
        with contextlib.suppress(TransportError):
            self._link.publish(self._topics.server_status, message.to_bytes(), retain=True)

    def event(self, event: RunEvent) -> None:
        """Tell whoever watches the server's runs what happened."""
        with contextlib.suppress(TransportError):
            self._link.publish(self._topics.server_events, event.to_bytes())

    def offer(self, task: TaskRecord, instructions: Instructions, seconds_left: float) -> None:
        """Ask a device to take its task."""
        choices = tuple(
            TierChoice(tier=item.tier, artifact_set=item.artifact_set, weights=item.weights) for item in task.choices
        )
        self._send(
            task.device,
            Offer.model_validate(
                {
                    **self._head(task),
                    **instructions.model_dump(),
                    "version": task.version,
                    "choices": choices,
                    "seconds_left": max(seconds_left, 0.001),
                }
            ),
        )

    def cancel(self, task: TaskRecord, reason: str) -> None:
        """Tell a device that its task is over."""
        self._send(task.device, Cancel.model_validate({**self._head(task), "reason": reason}))

    def sum(self, task: TaskRecord, told: Mapping[str, object]) -> None:
        """Tell a device what its next step in a secure sum needs."""
        self._send(task.device, Sum.model_validate({**self._head(task), **told}))

    def acknowledge(self, task: TaskRecord) -> None:
        """Tell a device that its update is on disk."""
        self._send(task.device, UploadAck.model_validate(self._head(task)))

    def missing(self, task: TaskRecord, ranges: Ranges) -> None:
        """Ask a device for chunks of its update."""
        self._send(task.device, UploadMissing.model_validate({**self._head(task), "ranges": ranges}))

    def refuse(self, task: TaskRecord, device: str, reason: RefusalReason, detail: str) -> None:
        """Refuse an update to the device that sent it, which is not always the owner of the task."""
        message = UploadRefused.model_validate({**self._head(task), "reason": reason, "detail": detail})
        self._send(device, message)
