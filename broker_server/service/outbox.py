"""Everything the server says on MQTT, as typed messages."""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from broker_server.service.alone import name_of, rival
from broker_server.store import TaskRecord
from fleet_protocol.control import RunEvent
from fleet_protocol.errors import RefusalReason, TransportError
from fleet_protocol.messages import Instructions, Offer, ServerStatus, UploadRefused
from fleet_protocol.messages.header import TaskMessage
from fleet_protocol.topics import Topics
from fleet_protocol.transport import Transport

_LOG = logging.getLogger(__name__)
_MOST_RIVALS = 10


class Outbox:
    """Sends the server's messages.

    A message that paho cannot take is dropped: every exchange of the protocol is repeated by
    whoever waits for it. Events of the server are also passed to `also`.
    """

    def __init__(
        self,
        link: Transport,
        topics: Topics,
        folder: Path,
        *,
        also: Callable[[bytes], None] = lambda _status: None,
    ) -> None:
        self._also = also
        self._link = link
        self._topics = topics
        self._store = name_of(folder)
        self._rivals: set[str] = set()

    def send(self, device: str, message: TaskMessage) -> None:
        """Send a message to a device."""
        with contextlib.suppress(TransportError):
            self._link.publish(self._topics.task(device), message.to_bytes())

    def status(self, run: str | None) -> None:
        """Say, retained, that the server is here, and with which run."""
        message = ServerStatus(fleet=self._topics.fleet, online=True, run=run, store=self._store)
        self._also(message.to_bytes())
        with contextlib.suppress(TransportError):
            self._link.publish(self._topics.server_status, message.to_bytes(), retain=True)

    def rival(self, payload: bytes, run: str | None) -> str:
        """That another server says it has this fleet, with what to do, once for each.

        Empty where it is this one.

        The farewell of one that goes has taken the place of what this one said, so it is said
        again.
        """
        other = rival(payload, self._store)
        if other == "":
            self.status(run)
        if not other or other in self._rivals or len(self._rivals) >= _MOST_RIVALS:
            return ""
        self._rivals.add(other)
        why = f"another server has fleet {self._topics.fleet}, too (store {other}): stop one of the two"
        _LOG.error(why)
        return why

    def event(self, event: RunEvent) -> None:
        """Tell whoever watches the server's runs what happened."""
        with contextlib.suppress(TransportError):
            self._link.publish(self._topics.server_events, event.to_bytes())

    def offer(self, task: TaskRecord, instructions: Instructions, seconds_left: float) -> None:
        """Ask a device to take its task."""
        left = max(round(seconds_left, 3), 0.001)
        asked = dict(instructions) | {
            "run": task.run,
            "round": task.round,
            "version": task.version,
        }
        self.tell(Offer, task, **asked, choices=task.choices, seconds_left=left)

    def tell(self, kind: type[TaskMessage], task: TaskRecord, **said: object) -> None:
        """Send a kind of message about a task to its device."""
        self.send(task.device, kind.model_validate({"task": task.id, **said}))

    def refuse(self, task: TaskRecord, device: str, reason: RefusalReason, detail: str) -> None:
        """Refuse an update to the device that sent it, which is not always the owner of the task."""
        about = {
            "task": task.id,
            **({"run": task.run, "round": task.round} if task.run and task.round else {}),
        }
        self.send(
            device,
            UploadRefused.model_validate({**about, "reason": reason, "detail": detail}),
        )
