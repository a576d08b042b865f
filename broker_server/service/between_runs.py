"""Handles messages while no run is in progress: presence, missing chunks of releases, requests."""

import time
from dataclasses import dataclass

from broker_server.rounds.fleet import Fleet
from broker_server.service.asking import Asking
from broker_server.service.blob_service import BlobService
from broker_server.service.control import Act, Control
from broker_server.service.limits import LINES, Bucket, Limits
from broker_server.service.outbox import Outbox
from broker_server.store import Store
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.messages import (
    NeedChunks,
    Predicted,
    parse_device_message,
    parse_presence,
)
from fleet_protocol.topics import DeviceTopic, ServerTopic, Topics
from fleet_protocol.transport import Received


@dataclass
class BetweenRuns:
    """Passes each message to its handler.

    Attributes:
        topics: the fleet's topics.
        known: the devices that have connected.
        store: the server's store.
        limits: how much the server reads from each sender.
        releases: serves releases to boards.
        asking: requests predictions from boards.
        outbox: sends over MQTT.
    """

    topics: Topics
    known: Fleet
    store: Store
    limits: Limits
    releases: BlobService
    asking: Asking
    outbox: Outbox

    def __post_init__(self) -> None:
        self._lines = Bucket(LINES)

    def route(self, event: Received, control: Control, act: Act) -> None:
        """Handle a message; requests to the server go through `control` to `act`."""
        topic = self.topics.parse(event.topic)
        try:
            if isinstance(topic, DeviceTopic):
                self.limits.check(topic.device, topic.channel, time.monotonic(), len(event.payload))
                self.known.mark_active(topic.device)
                self._of_device(topic, event.payload)
            elif topic == ServerTopic("control"):
                control.take(event, act)
            elif topic == ServerTopic("status") and (why := self.outbox.rival(event.payload, None)):
                self.store.log("another-server", why)
        except RefusedError as error:
            known = isinstance(topic, DeviceTopic) and self.known.knows(topic.device)
            self.refused(error, topic.device if isinstance(topic, DeviceTopic) and known else "")

    def _of_device(self, topic: DeviceTopic, payload: bytes) -> None:
        if topic.channel in {"status", "profile"}:
            said = parse_presence(payload).told(fleet=self.topics.fleet, device=topic.device)
            if (said.fleet, said.device) == (self.topics.fleet, topic.device):
                self.known.receive(said)
                self.store.record_device(said)
        elif topic.channel == "reply":
            reply = parse_device_message(payload).told(device=topic.device)
            if isinstance(reply, NeedChunks) and reply.device == topic.device:
                self.releases.need(reply.device, reply.digest, reply.ranges)
            elif isinstance(reply, Predicted) and reply.device == topic.device:
                self.asking.take(reply)

    def refused(self, error: RefusedError, device: str = "") -> None:
        """Count a refused message, and log the first few."""
        self.count(error.reason, device)
        if self._lines.take(time.monotonic()):
            self.store.log("refused", f"{error.reason.value}: {error}")

    def count(self, reason: RefusalReason, device: str = "") -> None:
        """Count a refused message for its device, or for unknown senders together."""
        self.store.count_refusal("", device, reason, "server")
