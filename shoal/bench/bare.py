"""The baseline: the same bytes through the same broker, to all devices and back from each.

It does nothing else. Its clients are plain paho clients, each with its own network loop.
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
# First byte of a chunk: one value for the last chunk, another for all others.
_CHUNK = b"c"
_LAST = b"o"
_WAIT_SECONDS = 120.0
_DIGEST = "bare"  # name of the broadcast in its topics


class BareDevice:
    """Receives every chunk of a broadcast and sends the same number of bytes back."""

    def __init__(self, client: SwarmClient) -> None:
        self._client = client
        self._chunks: list[bytes] = []

    def on_connected(self) -> None:
        """Subscribe to the broadcast, and report."""
        self._client.subscribe(self._client.topics.blob_filter(_DIGEST))
        self._client.publish(self._client.topics.reply(self._client.name), _READY)

    def on_message(self, topic: str, payload: bytes) -> None:
        """Keep a chunk; after the last one, which its first byte marks, send all of them back."""
        del topic
        self._chunks.append(payload)
        if payload[:1] != _LAST:
            return
        for index, chunk in enumerate(self._chunks):
            self._client.publish(self._client.topics.upload(self._client.name, index), chunk)
        self._chunks = []

    def on_tick(self, now: float) -> None:
        """Do nothing: the baseline repeats no message."""


def bare_client(topics: Topics, name: str) -> SwarmClient:
    """Return a bare device with its connection."""
    client = SwarmClient(topics, name)
    client.behaviour = BareDevice(client)
    return client


@dataclass(frozen=True)
class BareRound:
    """One fan-out and fan-in.

    Attributes:
        seconds: time from the first byte to the last.
        cpu_seconds: processor time of the process that sends and counts.
    """

    seconds: float
    cpu_seconds: float


class BareServer:
    """Sends the broadcast and counts the replies while the context lasts.

    Paho's thread handles the network.

    Raises:
        TransportError: a device is missing, or a chunk does not come back.
    """

    def __init__(self, topics: Topics, address: BrokerAddress) -> None:
        self._address = address
        self._events: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._client = SwarmClient(topics, "middle")
        self._client.behaviour = self

    def __enter__(self) -> Self:
        # Paho calls this in its own thread, so events cross in a queue.
        self._client.client.on_subscribe = lambda *_: self._events.put("subscription")
        self._client.connect(self._address)
        self._client.client.loop_start()
        # Subscribe before any device reports, so that no report is missed.
        # Two subscriptions: to the reports and to the uploads.
        self._await(2, "subscriptions")
        return self

    def __exit__(self, *_: object) -> None:
        self._client.client.disconnect()
        self._client.client.loop_stop()

    def on_connected(self) -> None:
        """Subscribe to the messages of all devices."""
        self._client.subscribe(self._client.topics.reply("+"))
        self._client.subscribe(self._client.topics.upload("+", "+"))

    def on_message(self, topic: str, payload: bytes) -> None:
        """Count a device that has reported, or a chunk that has come back."""
        del payload
        self._events.put(topic)

    def on_tick(self, now: float) -> None:
        """Do nothing: the baseline repeats no message."""

    def rounds(
        self,
        devices: int,
        chunks: tuple[bytes, ...],
        rounds: int,
    ) -> list[BareRound]:
        """Send chunks to all devices and receive the same number from each, a few times.

        The first round begins when all devices are there.
        """
        self._await(devices, "devices")
        # The first byte is replaced and not added, so that a chunk keeps its size.
        broadcast = [_CHUNK + chunk[1:] for chunk in chunks[:-1]]
        broadcast.append(_LAST + chunks[-1][1:])
        return [self._round(broadcast, devices) for _ in range(rounds)]

    def _round(self, broadcast: list[bytes], devices: int) -> BareRound:
        # Both clocks start at the first byte and include the work of paho's thread.
        began = time.monotonic()
        cpu_began = time.process_time()
        for index, chunk in enumerate(broadcast):
            self._client.publish(self._client.topics.blob(_DIGEST, index), chunk)
        self._await(devices * len(broadcast), "chunks")
        return BareRound(time.monotonic() - began, time.process_time() - cpu_began)

    def _await(self, count: int, events: str) -> None:
        """Wait for this many events; `events` names them in the error message."""
        deadline = time.monotonic() + _WAIT_SECONDS
        for received in range(count):
            try:
                # One deadline covers all events, so the wait for the next one gets shorter.
                self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TransportError(
                    f"the bare baseline got {received} of {count} {events}"
                ) from None
