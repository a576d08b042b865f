"""Handles messages while no run is in progress: presence, missing chunks of releases, requests."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from broker_server.rounds.fleet import Fleet
from broker_server.service.blob_service import BlobService
from broker_server.service.control_socket import LocalRequest
from broker_server.service.limits import LINES, TokenBucket
from broker_server.service.outbox import Outbox
from broker_server.service.prediction_requests import PredictionRequests
from broker_server.service.routing import Handlers
from broker_server.store import Store
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.messages import (
    DeviceProfile,
    DeviceStatus,
    NeedChunks,
    Predicted,
    parse_device_message,
)
from fleet_protocol.topics import Topics
from fleet_protocol.transport import Received


@dataclass
class BetweenRuns:
    """The handlers of a server without a run.

    Attributes:
        topics: the fleet's topics.
        devices: the devices that have connected.
        store: the server's store.
        releases: serves releases to boards.
        predictions: requests predictions from boards.
        outbox: sends over MQTT.
    """

    topics: Topics
    devices: Fleet
    store: Store
    releases: BlobService
    predictions: PredictionRequests
    outbox: Outbox

    def __post_init__(self) -> None:
        self._lines = TokenBucket(LINES)

    def handlers(self, request: Callable[[Received | LocalRequest], None]) -> Handlers:
        """Return the handlers, including that of requests to the server."""
        return Handlers(
            sign_of_life=self.devices.mark_active,
            presence=self._receive_presence,
            reply=self._receive_reply,
            # Chunks of a run that is over, or that a restarted server has not resumed yet.
            chunk=_ignore_chunk,
            request=request,
            server_status=self._note_other_server,
            refused=self.refused,
        )

    def _receive_presence(self, presence: DeviceStatus | DeviceProfile) -> None:
        # The next run reads the presence of devices when it begins.
        self.devices.receive(presence)
        self.store.record_device(presence)

    def _receive_reply(self, device: str, payload: bytes) -> None:
        reply = parse_device_message(payload).completed(device=device)
        if reply.device != device:
            raise RefusedError(
                RefusalReason.UNKNOWN_DEVICE,
                f"a {reply.type} of {reply.device} arrived on the topic of {device}",
            )
        # Messages about a task wait for the next run: devices repeat them.
        if isinstance(reply, NeedChunks):
            self.releases.request(device, reply.digest, reply.ranges)
        elif isinstance(reply, Predicted):
            self.predictions.receive(reply)

    def _note_other_server(self, payload: bytes) -> None:
        why = self.outbox.find_other_server(payload, None)
        if why:
            self.store.log("another-server", why)

    def refused(self, error: RefusedError, device: str | None = None) -> None:
        """Count a refused message, and log the first few."""
        self.count(error.reason, device)
        if self._lines.spend(time.monotonic()):  # a flood must not fill the log
            self.store.log("refused", f"{error.reason.value}: {error}", device=device)

    def count(self, reason: RefusalReason, device: str | None = None) -> None:
        """Count a refused message for its device, or for unknown senders together."""
        self.store.count_refusal("", device or "", reason, "server")


def _ignore_chunk(_task: str, _chunk: Received) -> None:
    """Ignore a late chunk: its device gets an answer when it announces the update in a run."""
