"""Blobs on request: what several devices wait for is published once and the broker fans it out.

Requests for one blob are collected until every device that was offered it has asked, or has said
that it will not; or, where one stays silent, until no request has come for a moment. Then the union
of the wanted chunks is published. A chunk lost on the way is asked for again by whoever misses it,
and published again when those before it have reached everybody: a thousand devices that wait must
not each bring about another thousand copies. A blob goes out a window of chunks at a time, and what
came in is handled in between: the broker's acknowledgements wait behind it.
"""

import math
import mmap
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fleet_protocol.blobs import (
    BARE_OVERHEAD,
    FRAME_OVERHEAD,
    indices_of,
    iter_chunks,
    ranges_of,
)
from fleet_protocol.digests import matches
from fleet_protocol.errors import BlobError, ConfigError, TransportError
from fleet_protocol.foreign_files import file_state, open_regular
from fleet_protocol.messages import Ranges
from fleet_protocol.messages.bounds import CHUNKS_LIMIT
from fleet_protocol.refusals import remedy
from fleet_protocol.topics import Topics
from fleet_protocol.transport import SEND_WINDOW, Transport

WINDOW_SECONDS = 0.15  # without a request, after which those that came are served
PROMISED_SECONDS = 0.5  # the same where somebody who was offered the blob has not answered yet
LONGEST_SECONDS = 2.0  # after the first request, however many still come
FAN_OUT_BYTES = (
    50e6  # that a broker hands out in a second; until then what is published is on its way
)
GAP_SECONDS = 1.0  # since the last arrival: so long it is still on its way
PUBLISH_SECONDS = 10.0  # a broker that takes nothing for so long is away; the devices ask again
PACKET_ROOM = 1024  # beside the payload of a chunk: topic, numbers, digest, signature
TURN_SECONDS = 0.2  # that its acknowledgements are waited for at once


@dataclass
class Wanted:
    """Requests for one blob that were not served yet."""

    since: float  # `time.monotonic()` of the first
    last: float  # of the newest
    devices: dict[str, Ranges] = field(default_factory=dict)  # who asked, and for which chunks


@dataclass
class _UnderWay:
    """A blob that is published, and on its way."""

    devices: set[str]  # who asked for it, and has not begun to work yet
    chunks: list[int]  # that are still to be published
    seconds: float  # that a broker takes to hand all of them out
    # ``time.monotonic()`` when it is given up if none is published, later when it has arrived
    until: float
    # the file, mapped from the first chunk to the last; one that is removed meanwhile stays
    # readable
    data: memoryview | None = None
    again: bool = False  # some of the chunks were published before


@dataclass(frozen=True)
class _Served:
    path: Path
    size: int
    chunk_bytes: int
    verified: set[tuple[int, ...]] = field(
        default_factory=set
    )  # states of files that had the digest

    @property
    def chunks(self) -> int:
        return -(-self.size // self.chunk_bytes)


def _payload_bytes(chunks: Iterable[int], size: int, chunk_bytes: int) -> int:
    """Payload bytes of some chunks of a blob."""
    return sum(max(0, min(chunk_bytes, size - index * chunk_bytes)) for index in chunks)


def chunk_bytes_for(link: Transport, wanted: int) -> int:
    """Payload bytes of a chunk, as they are wanted.

    Raises:
        ConfigError: the broker says that it takes no packets of that size.
    """
    if wanted > link.packet_bytes - PACKET_ROOM:
        raise ConfigError(
            f"the broker at {link.address} takes packets of {link.packet_bytes:,} bytes, which has no room for "
            f"chunks of {wanted:,}; {remedy('Packet too large')}"
        )
    return wanted


class BlobService:
    """Publishes blobs that devices ask for."""

    def __init__(self, link: Transport, topics: Topics, chunk_bytes: int) -> None:
        self._link = link
        self._topics = topics
        self._chunk_bytes = chunk_bytes
        self._served: dict[str, _Served] = {}
        self._expected: dict[str, set[str]] = {}
        self._by_device: dict[str, set[str]] = {}
        self._wanted: dict[str, Wanted] = {}
        self._asked: set[tuple[str, str]] = set()
        self._published: dict[str, set[int]] = {}
        self._under_way: dict[str, _UnderWay] = {}
        self._payload_bytes = 0

    def serve(self, files: Mapping[str, Path], chunk_bytes: int | None = None) -> None:
        """Offer files by digest, in chunks of this size or the usual.

        Their content must not change.
        """
        for digest, path in files.items():
            known = self._served.get(digest)
            if known is None or known.path != path:
                size = path.stat().st_size
                self._served[digest] = _Served(path, size, chunk_bytes or self._chunk_bytes)

    def withdraw(self, digests: Iterable[str]) -> None:
        """Offer blobs no longer, and forget who got them."""
        gone = set(digests)
        for digest in gone:
            self._served.pop(digest, None)
            self._expected.pop(digest, None)
            self._wanted.pop(digest, None)
            self._published.pop(digest, None)
            self._under_way.pop(digest, None)
        self._asked = {key for key in self._asked if key[0] not in gone}

    def expect(self, digest: str, device: str) -> None:
        """A device was offered a blob and will ask for it, or say that it has it."""
        self._expected.setdefault(digest, set()).add(device)
        self._by_device.setdefault(device, set()).add(digest)

    def forget(self, device: str, but: Collection[str] = ()) -> None:
        """Wait for no more requests of a device, but for these: it is gone, or has the blobs, or
        took another tier.
        """
        for digest in self._by_device.pop(device, set()).difference(but):
            self._expected.get(digest, set()).discard(device)

    def arrived(self, device: str) -> None:
        """A device has begun its work: it wants nothing more, and what others wait for is still on
        its way to them.
        """
        for wanted in self._wanted.values():
            wanted.devices.pop(device, None)
        for sent in self._under_way.values():
            if device in sent.devices:
                sent.devices.discard(device)
                sent.until = max(sent.until, time.monotonic() + GAP_SECONDS)

    def asked(self, digest: str, device: str) -> bool:
        """Whether a device asked for a blob before, and so will not again."""
        return (digest, device) in self._asked

    def need(self, device: str, digest: str, ranges: Ranges = ((0, CHUNKS_LIMIT),)) -> bool:
        """Take a request from a device that may have the blob, by default for all of it.

        False if it is unknown.
        """
        if digest not in self._served:
            return False
        now = time.monotonic()
        waiting = self._wanted.setdefault(digest, Wanted(now, now))
        waiting.last = now
        waiting.devices[device] = ranges
        self._expected.get(digest, set()).discard(device)
        self._asked.add((digest, device))
        return True

    def next_due(self) -> float | None:
        """When `flush` has something to do, on the monotonic clock."""
        if any(sent.chunks for sent in self._under_way.values()):
            return -math.inf
        return min(
            (self._due(digest, wanted) for digest, wanted in self._wanted.items()),
            default=None,
        )

    def _due(self, digest: str, wanted: Wanted) -> float:
        sent = self._under_way.get(digest)
        return max(0.0 if sent is None else sent.until, self._complete(digest, wanted))

    def _complete(self, digest: str, wanted: Wanted) -> float:
        if digest not in self._expected:  # a graph: nobody knows who will ask, a board may have it
            return min(wanted.last + WINDOW_SECONDS, wanted.since + LONGEST_SECONDS)
        if not self._expected[digest]:
            return wanted.since
        return min(wanted.last + PROMISED_SECONDS, wanted.since + LONGEST_SECONDS)

    def flush(self, now: float) -> list[str]:
        """Publish a window of everything that is due; `now` is ``time.monotonic()``.

        Returns:
            Problems for the log: the broker does not take the chunks, or a file cannot be read. The
                devices ask again, so none of them ends a round.
        """
        for digest in [
            digest for digest, wanted in self._wanted.items() if self._due(digest, wanted) <= now
        ]:
            asked = self._wanted.pop(digest).devices
            served = self._served[digest]
            chunks = sorted(
                {index for ranges in asked.values() for index in indices_of(ranges, served.chunks)}
            )
            seconds = (
                _payload_bytes(chunks, served.size, served.chunk_bytes) * len(asked) / FAN_OUT_BYTES
            )
            self._under_way[digest] = _UnderWay(set(asked), chunks, seconds, now + PUBLISH_SECONDS)
        problems = []
        for digest, sent in self._under_way.items():
            if not sent.chunks:
                continue
            try:
                self._publish(digest, sent)
                sent.until = now + (PUBLISH_SECONDS if sent.chunks else sent.seconds)
            except (TransportError, BlobError) as error:
                if isinstance(error, BlobError) or now >= sent.until:
                    problems.append(
                        f"blob {digest[:12]} for {', '.join(sorted(sent.devices))}: {error}"
                    )
                    sent.chunks = []
        return problems

    def _publish(self, digest: str, sent: _UnderWay) -> None:
        served = self._served[digest]
        known = self._published.setdefault(digest, set())
        if sent.data is None:
            sent.again = not known.isdisjoint(sent.chunks)
            sent.data = _mapped(served, digest)
        window = sent.chunks[:SEND_WINDOW]
        digests = sent.again and not self._link.authentic
        frames = iter_chunks(
            sent.data, served.chunk_bytes, ranges_of(window), digests=digests, pack=True
        )
        payload: dict[int, int] = {}

        def messages() -> Iterator[tuple[str, bytes]]:
            for index, frame in frames:
                payload[index] = len(frame) - (FRAME_OVERHEAD if digests else BARE_OVERHEAD)
                yield self._topics.blob(digest, index), frame

        self._link.publish_stream(messages(), time.monotonic() + TURN_SECONDS)
        self._payload_bytes += sum(payload[index] for index in payload.keys() - known)
        known.update(window)
        del sent.chunks[:SEND_WINDOW]
        if not sent.chunks:
            sent.data = None

    def take_payload_bytes(self) -> int:
        """Payload bytes published since the last call, packed.

        A chunk that is published again counts no more.
        """
        taken = self._payload_bytes
        self._payload_bytes = 0
        return taken


def _mapped(served: _Served, digest: str) -> memoryview:
    """The bytes of a blob, from the page cache, for as long as somebody has them.

    The path may name another file than the one that was offered, so the server hashes and publishes
    the bytes of one open descriptor. It hashes a file whose state stays the same once.

    Raises:
        BlobError: the file cannot be read, is a link, or is no longer what was offered.
    """
    path = served.path
    try:
        with open_regular(path) as file:
            state = file_state(file)
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:  # a file of no bytes cannot be mapped
        raise BlobError(f"cannot read {path}: {error}") from error
    if state in served.verified and len(data) == served.size:
        return data
    if len(data) != served.size or not matches(data, digest):
        raise BlobError(f"{path} was changed on disk; it no longer has the digest that was offered")
    served.verified.add(state)
    return data
