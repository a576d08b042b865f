"""The baseline: the same bytes through the same broker, fanned out to all devices and in from each,
and nothing else.

Its clients are paho's own, each driven as paho's users drive it.
"""

import queue
import time
from dataclasses import dataclass

from typing_extensions import Self

from fleet_protocol.errors import TransportError
from fleet_protocol.topics import Topics
from fleet_protocol.transport import BrokerAddress
from shoal.bench.swarm import Member

_READY = b"r"
_OVER = b"o"
_WAIT_SECONDS = 120.0


class BareDevice:
    """Takes every chunk of a broadcast and sends as many bytes back."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._chunks: list[bytes] = []

    def on_connected(self) -> None:
        """Listen for the broadcast and say so."""
        self._member.subscribe(self._member.topics.blob_filter("bare"))
        self._member.publish(self._member.topics.reply(self._member.name), _READY)

    def on_message(self, topic: str, payload: bytes) -> None:
        """A chunk; the last one, which says so in its first byte, is answered with all of them."""
        del topic
        self._chunks.append(payload)
        if payload[:1] == _OVER:
            for index, chunk in enumerate(self._chunks):
                self._member.publish(self._member.topics.upload(self._member.name, index), chunk)
            self._chunks = []

    def on_tick(self, now: float) -> None:
        """Repeat nothing."""


def bare_member(topics: Topics, name: str) -> Member:
    """A bare device with its connection."""
    member = Member(topics, name)
    member.behaviour = BareDevice(member)
    return member


@dataclass(frozen=True)
class BareRound:
    """One fan-out and fan-in, from the first byte to the last, and the CPU time of the process in
    the middle.
    """

    seconds: float
    cpu_seconds: float


class Middle:
    """Who sends the broadcast and counts what comes back, with the network in paho's thread, while
    the context lasts.

    What does not come, or come back, is a TransportError.
    """

    def __init__(self, topics: Topics, address: BrokerAddress) -> None:
        self._address = address
        self._events: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._member = Member(topics, "middle")
        self._member.behaviour = self

    def __enter__(self) -> Self:
        self._member.client.on_subscribe = lambda *_: self._events.put("subscription")
        self._member.connect(self._address)
        self._member.client.loop_start()
        self._take(2, "subscriptions")
        return self

    def __exit__(self, *_: object) -> None:
        self._member.client.disconnect()
        self._member.client.loop_stop()

    def on_connected(self) -> None:
        """Listen to all devices."""
        self._member.subscribe(self._member.topics.reply("+"))
        self._member.subscribe(self._member.topics.upload("+", "+"))

    def on_message(self, topic: str, payload: bytes) -> None:
        """A device is there, or a chunk has come back."""
        del payload
        self._events.put(topic)

    def on_tick(self, now: float) -> None:
        """Repeat nothing."""

    def _take(self, count: int, what: str) -> None:
        deadline = time.monotonic() + _WAIT_SECONDS
        for got in range(count):
            try:
                self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TransportError(f"the bare baseline got {got} of {count} {what}") from None

    def rounds(self, devices: int, chunks: tuple[bytes, ...], rounds: int) -> list[BareRound]:
        """Send chunks to all devices, once all are there, and take as many back from each, a few
        times.
        """
        self._take(devices, "devices")
        sent = [b"c" + chunk[1:] for chunk in chunks[:-1]] + [_OVER + chunks[-1][1:]]
        found = []
        for _ in range(rounds):
            began = time.monotonic()
            used = time.process_time()
            for index, chunk in enumerate(sent):
                self._member.publish(self._member.topics.blob("bare", index), chunk)
            self._take(devices * len(chunks), "chunks")
            found.append(BareRound(time.monotonic() - began, time.process_time() - used))
        return found
