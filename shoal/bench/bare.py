"""The baseline: the same bytes through the same broker, fanned out to all devices and in from each, by paho alone."""

import queue
import time
from dataclasses import dataclass

from fleet_protocol.errors import TransportError
from fleet_protocol.topics import Topics
from fleet_protocol.transport import BrokerAddress, Received, open_transport
from shoal.bench.swarm import Member

_READY, _OVER = b"r", b"o"
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
    """One fan-out and fan-in, from the first byte to the last, and the CPU time of the process in the middle."""

    seconds: float
    cpu_seconds: float


def bare_rounds(
    topics: Topics, address: BrokerAddress, devices: int, chunks: tuple[bytes, ...], rounds: int
) -> list[BareRound]:
    """Send chunks to all devices and take as many back from each, a few times; a TransportError if one is missing."""
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    link = open_transport(address, f"shoal-{topics.fleet}-middle", inbox, session_expiry_seconds=0)  # type: ignore[arg-type]
    link.connect()

    def take(count: int, what: str) -> None:
        deadline = time.monotonic() + _WAIT_SECONDS
        for got in range(count):
            event = None
            while not isinstance(event, Received):
                try:
                    event = inbox.get(timeout=max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    raise TransportError(f"the bare baseline got {got} of {count} {what}") from None

    found = []
    try:
        link.subscribe(topics.reply("+"))
        link.subscribe(topics.upload("+", "+"))
        take(devices, "devices")
        sent = [b"c" + chunk[1:] for chunk in chunks[:-1]] + [_OVER + chunks[-1][1:]]
        for _ in range(rounds):
            began, used = time.monotonic(), time.process_time()
            deadline = began + _WAIT_SECONDS
            link.publish_stream(((topics.blob("bare", index), chunk) for index, chunk in enumerate(sent)), deadline)
            take(devices * len(chunks), "chunks")
            found.append(BareRound(time.monotonic() - began, time.process_time() - used))
    finally:
        link.close()
    return found
