"""What a server hears while no run is in progress: who is there, which chunks of a release are missing, requests."""

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
from fleet_protocol.messages import NeedChunks, Predicted, parse_device_message, parse_presence
from fleet_protocol.topics import DeviceTopic, ServerTopic, Topics
from fleet_protocol.transport import Received


@dataclass
class BetweenRuns:
    """Puts what comes where it belongs.

    Attributes:
        topics: of the fleet.
        known: who has been there.
        store: of the server.
        limits: how much is read of whom.
        releases: serves what boards are to run.
        asking: asks boards for predictions.
        outbox: over MQTT.
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
        """Handle a message; what it asks of the server goes through `control` to `act`."""
        topic = self.topics.parse(event.topic)
        try:
            if isinstance(topic, DeviceTopic):
                self.limits.check(topic.device, topic.channel, time.monotonic(), len(event.payload))
                self.known.heard(topic.device)
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
                self.known.see(said)
                self.store.see_device(said)
        elif topic.channel == "reply":
            reply = parse_device_message(payload).told(device=topic.device)
            if isinstance(reply, NeedChunks) and reply.device == topic.device:
                self.releases.need(reply.device, reply.digest, reply.ranges)
            elif isinstance(reply, Predicted) and reply.device == topic.device:
                self.asking.take(reply)

    def refused(self, error: RefusedError, device: str = "") -> None:
        """Count what was refused, and write a line of the log about it as long as there are few."""
        self.count(error.reason, device)
        if self._lines.take(time.monotonic()):
            self.store.log("refused", f"{error.reason.value}: {error}")

    def count(self, reason: RefusalReason, device: str = "") -> None:
        """Count what was refused, of a device that is known, or of nobody in particular."""
        self.store.count_refusal("", device, reason, "server")
