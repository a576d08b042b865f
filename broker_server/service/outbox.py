"""Sends the server's messages over MQTT."""

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

from broker_server.service.other_servers import describe_store, other_store
from broker_server.store import TaskRecord
from fleet_protocol.control import RunEvent
from fleet_protocol.errors import BrokerRefusedError, RefusalReason, TransportError
from fleet_protocol.messages import (
    Instructions,
    Introduce,
    Offer,
    ServerStatus,
    UploadRefused,
)
from fleet_protocol.messages.header import Message, TaskMessage
from fleet_protocol.refused_presence import RefusedPresence
from fleet_protocol.topics import Topics
from fleet_protocol.transport import Refused, Transport

_LOG = logging.getLogger(__name__)
_MOST_NAMED = 10  # other servers that the log names


class Outbox:
    """Sends the server's messages.

    A message that paho cannot send is dropped: the waiting side repeats every exchange of the
    protocol.

    Args:
        link: the connection to the broker.
        topics: topics of the fleet.
        folder: folder of the server's store.
        also: receives the server's status, too.
        refused: receives messages that are too large for the broker.
    """

    def __init__(
        self,
        link: Transport,
        topics: Topics,
        folder: Path,
        *,
        also: Callable[[bytes], None] = lambda _status: None,
        refused: Callable[[Refused], None] = lambda _refused: None,
    ) -> None:
        self._refused = refused
        self._also = also
        self._link = link
        self._topics = topics
        self._store = describe_store(folder)
        self._named_stores: set[str] = set()
        # By topic of the server, once the broker has refused a message on it.
        self._kept_back: dict[str, RefusedPresence] = {}

    def send(self, device: str, message: Message) -> None:
        """Send a message to a device."""
        topic = self._topics.task(device)
        payload = message.to_bytes()
        try:
            self._link.publish(topic, payload)
        except BrokerRefusedError as error:
            self._refused(Refused(topic, error.code, len(payload)))
        except TransportError:
            # The side that waits for the message repeats its own.
            return

    def ask_for_introduction(self, device: str) -> None:
        """Ask a device for its profile and status again."""
        self.send(device, Introduce())

    def publish_status(self, run: str | None) -> None:
        """Publish, retained, that the server is online, and which run is in progress."""
        message = ServerStatus(fleet=self._topics.fleet, online=True, run=run, store=self._store)
        # First over the socket, which does not depend on the broker.
        self._also(message.to_bytes())
        self._announce(self._topics.server_status, message.to_bytes(), retain=True)

    def note_refused(self, topic: str) -> None:
        """Keep the server's messages on a topic back for some time if the broker refuses one."""
        if topic in {self._topics.server_status, self._topics.server_events}:
            self._kept_back.setdefault(topic, RefusedPresence()).note(time.monotonic())

    def _announce(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Publish a message of the server to everybody, unless the broker has refused the topic."""
        kept_back = self._kept_back.get(topic)
        if kept_back is not None and kept_back.holds(time.monotonic()):
            return
        with contextlib.suppress(TransportError):
            self._link.publish(topic, payload, retain=retain)

    def find_other_server(self, payload: bytes, run: str | None) -> str:
        """Return a warning about another server of the fleet, from a status on its topic.

        The farewell of another server replaces this server's retained status, which is then
        published again.

        Args:
            payload: the status as received.
            run: id of the run in progress, if any.

        Returns:
            The remedy, once for each server; empty if the status is this server's.
        """
        store = other_store(payload, self._store)
        if store == "":
            self.publish_status(run)
        # Anybody at an open broker can invent servers: few are named, each once.
        if not store or store in self._named_stores or len(self._named_stores) >= _MOST_NAMED:
            return ""
        self._named_stores.add(store)
        why = f"fleet {self._topics.fleet} has a second server (store {store}): stop one of the two"
        _LOG.error(why)
        return why

    def publish_event(self, event: RunEvent) -> None:
        """Publish an event of a run for its followers."""
        self._announce(self._topics.server_events, event.to_bytes())

    def offer(self, task: TaskRecord, instructions: Instructions, seconds_left: float) -> None:
        """Offer a task to its device."""
        fields = {
            **dict(instructions),
            "run": task.run,
            "round": task.round,
            "version": task.version,
        }
        left = max(round(seconds_left, 3), 0.001)
        self.send_about(Offer, task, **fields, choices=task.choices, seconds_left=left)

    def send_about(self, kind: type[TaskMessage], task: TaskRecord, **fields: object) -> None:
        """Send a kind of message about a task to its device."""
        self.send(task.device, kind.model_validate({"task": task.id, **fields}))

    def refuse(self, task: TaskRecord, device: str, reason: RefusalReason, detail: str) -> None:
        """Refuse an update to the device that sent it, which need not own the task."""
        fields: dict[str, object] = {"task": task.id}
        if task.run and task.round:  # a device may have named neither
            fields |= {"run": task.run, "round": task.round}
        refused = UploadRefused.model_validate({**fields, "reason": reason, "detail": detail})
        self.send(device, refused)
