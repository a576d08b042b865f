"""The baseline: the same bytes through the same broker, out to all devices and in from each.

There is nothing else. Its clients are paho's own, each driven as paho's users drive it.
"""

import queue
import time
from dataclasses import dataclass

from typing_extensions import Self

from fleet_protocol.errors import TransportError
from fleet_protocol.topics import Topics
from fleet_protocol.transport import BrokerAddress
from shoal.bench.swarm import SwarmClient

_READY = b"r"
# First bytes of chunks: of all but the last, and of the last.
_CHUNK = b"c"
_LAST = b"o"
_WAIT_SECONDS = 120.0
_DIGEST = "bare"  # of the broadcast, in its topics


class BareDevice:
    """Receives every chunk of a broadcast and sends as many bytes back."""

    def __init__(self, client: SwarmClient) -> None:
        self._client = client
        self._chunks: list[bytes] = []

    def on_connected(self) -> None:
        """Subscribe to the broadcast, and report."""
        self._client.subscribe(self._client.topics.blob_filter(_DIGEST))
        self._client.publish(self._client.topics.reply(self._client.name), _READY)

    def on_message(self, topic: str, payload: bytes) -> None:
        """Keep a chunk; answer the last one, which its first byte tells, with all of them."""
        del topic
        self._chunks.append(payload)
        if payload[:1] != _LAST:
            return
        for index, chunk in enumerate(self._chunks):
            self._client.publish(self._client.topics.upload(self._client.name, index), chunk)
        self._chunks = []

    def on_tick(self, now: float) -> None:
        """Repeat nothing."""


def bare_client(topics: Topics, name: str) -> SwarmClient:
    """Return a bare device with its connection."""
    client = SwarmClient(topics, name)
    client.behaviour = BareDevice(client)
    return client


@dataclass(frozen=True)
class BareRound:
    """One fan-out and fan-in.

    Attributes:
        seconds: from the first byte to the last.
        cpu_seconds: of the process that sends and counts.
    """

    seconds: float
    cpu_seconds: float


class BareServer:
    """Sends the broadcast and counts what comes back, while the context lasts.

    The network is in paho's thread.

    Raises:
        TransportError: something does not come, or does not come back.
    """

    def __init__(self, topics: Topics, address: BrokerAddress) -> None:
        self._address = address
        self._events: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._client = SwarmClient(topics, "middle")
        self._client.behaviour = self

    def __enter__(self) -> Self:
        self._client.client.on_subscribe = lambda *_: self._events.put("subscription")
        self._client.connect(self._address)
        self._client.client.loop_start()
        # Before a device reports, so that none is missed.
        self._await(2, "subscriptions")
        return self

    def __exit__(self, *_: object) -> None:
        self._client.client.disconnect()
        self._client.client.loop_stop()

    def on_connected(self) -> None:
        """Subscribe to what all devices send."""
        self._client.subscribe(self._client.topics.reply("+"))
        self._client.subscribe(self._client.topics.upload("+", "+"))

    def on_message(self, topic: str, payload: bytes) -> None:
        """Count a device that is there, or a chunk that has come back."""
        del payload
        self._events.put(topic)

    def on_tick(self, now: float) -> None:
        """Repeat nothing."""

    def rounds(
        self,
        devices: int,
        chunks: tuple[bytes, ...],
        rounds: int,
    ) -> list[BareRound]:
        """Send chunks to all devices and receive as many from each, a few times.

        The first round begins when all devices are there.
        """
        self._await(devices, "devices")
        broadcast = [_CHUNK + chunk[1:] for chunk in chunks[:-1]]
        broadcast.append(_LAST + chunks[-1][1:])
        return [self._round(broadcast, devices) for _ in range(rounds)]

    def _round(self, broadcast: list[bytes], devices: int) -> BareRound:
        # Both clocks from the first byte: what paho's thread computes counts, too.
        began = time.monotonic()
        cpu_began = time.process_time()
        for index, chunk in enumerate(broadcast):
            self._client.publish(self._client.topics.blob(_DIGEST, index), chunk)
        self._await(devices * len(broadcast), "chunks")
        return BareRound(time.monotonic() - began, time.process_time() - cpu_began)

    def _await(self, count: int, events: str) -> None:
        """Wait for so many events; `events` is their name for the message."""
        deadline = time.monotonic() + _WAIT_SECONDS
        for received in range(count):
            try:
                self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TransportError(
                    f"the bare baseline got {received} of {count} {events}"
                ) from None
