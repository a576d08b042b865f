"""Publishes requested blobs once for all devices that wait; the broker distributes the copies.

Requests for one blob are collected until every device that was offered it has sent a request or
declined; or, if a device stays silent, until no request has arrived for a moment. Then the union of
the requested chunks is published. A device requests a lost chunk again. It is published again once
the previous chunks have reached everybody: a thousand waiting devices must not each cause another
thousand copies. A blob is published a window of chunks at a time, and incoming messages are handled
in between, because the broker's acknowledgements are among them.
"""

import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from broker_server.service.served_file import ServedFile
from fleet_protocol.blobs import BARE_OVERHEAD, FRAME_OVERHEAD, frame_chunk, indices_of
from fleet_protocol.errors import BlobError, BrokerRefusedError, TransportError
from fleet_protocol.messages import Ranges
from fleet_protocol.messages.bounds import CHUNKS_LIMIT
from fleet_protocol.topics import Topics
from fleet_protocol.transport import SEND_WINDOW, Transport

WINDOW_SECONDS = 0.15  # without a request, after which the collected requests are served
PROMISED_SECONDS = 0.5  # the same while a device that was offered the blob has not answered yet
LONGEST_SECONDS = 2.0  # after the first request, even if further ones arrive
# that a broker delivers per second; until then published chunks are still in transit
FAN_OUT_BYTES = 50e6
GAP_SECONDS = 1.0  # after the last arrival, during which a blob still counts as in transit
# a broker that accepts nothing for so long counts as unreachable; the devices request the chunks
# again
PUBLISH_SECONDS = 10.0
TURN_SECONDS = 0.2  # that its acknowledgements are waited for at once


@dataclass
class _BlobRequests:
    """Requests for one blob that have not been served yet.

    Attributes:
        since: ``time.monotonic()`` of the first request.
        last: ``time.monotonic()`` of the newest request.
        devices: the chunks that each device has requested.
    """

    since: float
    last: float
    devices: dict[str, Ranges] = field(default_factory=dict)


@dataclass
class _UnderWay:
    """A blob that is published, and in transit.

    Attributes:
        devices: devices that requested it, and have not begun to work yet.
        chunks: indices of those that are still to be published.
        seconds: seconds that a broker needs to deliver all of them.
        until: ``time.monotonic()`` at which it is given up if no chunk is published; later, at
            which it has arrived.
        file: open from the first chunk to the last: one that is removed meanwhile stays readable.
        again: whether some of the chunks were published before.
    """

    devices: set[str]
    chunks: list[int]
    seconds: float
    until: float
    file: ServedFile | None = None
    again: bool = False


@dataclass(frozen=True)
class _OfferedFile:
    """An offered file; `verified` contains its states that had the right digest."""

    path: Path
    size: int
    chunk_bytes: int
    verified: set[tuple[int, ...]] = field(default_factory=set)

    @property
    def chunks(self) -> int:
        return -(-self.size // self.chunk_bytes)

    def payload_bytes(self, chunks: Iterable[int]) -> int:
        """Return the payload bytes of some chunks; the last one may be short."""
        total = 0
        for index in chunks:
            total += max(0, min(self.chunk_bytes, self.size - index * self.chunk_bytes))
        return total


class BlobService:
    """Publishes the blobs that devices request.

    Args:
        link: the connection to the broker.
        topics: topics of the fleet.
        chunk_bytes: payload bytes of a chunk, unless `serve` says otherwise.
    """

    def __init__(self, link: Transport, topics: Topics, chunk_bytes: int) -> None:
        self._link = link
        self._topics = topics
        self._chunk_bytes = chunk_bytes
        self._served: dict[str, _OfferedFile] = {}
        self._expected: dict[str, set[str]] = {}  # devices that may still send a request, by digest
        self._by_device: dict[str, set[str]] = {}  # the inverse: digests by device
        self._wanted: dict[str, _BlobRequests] = {}
        self._asked: set[tuple[str, str]] = set()  # digest and device
        self._published: dict[str, set[int]] = {}  # indices of chunks, by digest
        self._under_way: dict[str, _UnderWay] = {}
        self._payload_bytes = 0

    def serve(self, files: Mapping[str, Path], chunk_bytes: int | None = None) -> None:
        """Offer files whose content does not change.

        Args:
            files: the files by digest.
            chunk_bytes: payload bytes of their chunks; None for the default.
        """
        for digest, path in files.items():
            served = self._served.get(digest)
            if served is None or served.path != path:
                size = path.stat().st_size
                self._served[digest] = _OfferedFile(path, size, chunk_bytes or self._chunk_bytes)

    def withdraw(self, digests: Iterable[str]) -> None:
        """Stop offering blobs, and forget which devices received them."""
        withdrawn = set(digests)
        for digest in withdrawn:
            self._served.pop(digest, None)
            self._expected.pop(digest, None)
            self._wanted.pop(digest, None)
            self._published.pop(digest, None)
            self._under_way.pop(digest, None)
        # Devices that are offered it again later may request it again.
        self._asked = {key for key in self._asked if key[0] not in withdrawn}

    def expect(self, digest: str, device: str) -> None:
        """Expect a request from a device that was offered a blob, until it has the blob."""
        self._expected.setdefault(digest, set()).add(device)
        self._by_device.setdefault(device, set()).add(digest)

    def forget(self, device: str, but: Collection[str] = ()) -> None:
        """Expect no more requests from a device, except for these blobs.

        It is offline, has the blobs, or took another tier.
        """
        for digest in self._by_device.pop(device, set()).difference(but):
            self._expected.get(digest, set()).discard(device)

    def note_work(self, device: str) -> None:
        """Record that a device has begun its work.

        It needs nothing more; chunks that others wait for are still in transit.
        """
        for wanted in self._wanted.values():
            wanted.devices.pop(device, None)
        for under_way in self._under_way.values():
            if device in under_way.devices:
                under_way.devices.discard(device)
                under_way.until = max(under_way.until, time.monotonic() + GAP_SECONDS)

    def waiting_for(self, digest: str) -> set[str]:
        """Return the devices that wait for a blob."""
        devices: set[str] = set()
        if digest in self._wanted:
            devices |= self._wanted[digest].devices.keys()
        if digest in self._under_way:
            devices |= self._under_way[digest].devices
        return devices

    def has_asked(self, digest: str, device: str) -> bool:
        """Return whether a device has requested a blob before, and so will not again."""
        return (digest, device) in self._asked

    def request(self, device: str, digest: str, ranges: Ranges = ((0, CHUNKS_LIMIT),)) -> bool:
        """Record a request of a device that may have the blob.

        Args:
            device: device that sent the request.
            digest: digest of the blob.
            ranges: ranges of the wanted chunks; all of them by default.

        Returns:
            Whether the blob is offered.
        """
        if digest not in self._served:
            return False
        now = time.monotonic()
        wanted = self._wanted.setdefault(digest, _BlobRequests(now, now))
        wanted.last = now
        wanted.devices[device] = ranges
        self._expected.get(digest, set()).discard(device)
        self._asked.add((digest, device))
        return True

    def next_due(self) -> float | None:
        """Return the ``time.monotonic()`` at which `flush` has something to do; None for never."""
        if any(under_way.chunks for under_way in self._under_way.values()):
            return -math.inf
        due = [self._due(digest, wanted) for digest, wanted in self._wanted.items()]
        return min(due, default=None)

    def _due(self, digest: str, wanted: _BlobRequests) -> float:
        under_way = self._under_way.get(digest)
        arrived = 0.0 if under_way is None else under_way.until
        return max(arrived, self._complete(digest, wanted))

    def _complete(self, digest: str, wanted: _BlobRequests) -> float:
        """Return when the requests for a blob count as complete."""
        if digest not in self._expected:  # a graph: any board may request it, or have it already
            return min(wanted.last + WINDOW_SECONDS, wanted.since + LONGEST_SECONDS)
        if not self._expected[digest]:
            return wanted.since
        return min(wanted.last + PROMISED_SECONDS, wanted.since + LONGEST_SECONDS)

    def flush(self, now: float) -> list[str]:
        """Publish a window of everything that is due at a ``time.monotonic()``.

        Returns:
            Problems for the log: the broker does not accept the chunks, or a file cannot be read.
                The devices send their requests again, so no problem ends a round.
        """
        for digest, wanted in list(self._wanted.items()):
            if self._due(digest, wanted) <= now:
                del self._wanted[digest]
                self._under_way[digest] = self._begin(digest, wanted, now)
        problems = []
        for digest, under_way in self._under_way.items():
            if not under_way.chunks:
                continue
            try:
                self._publish(digest, under_way)
            except (TransportError, BlobError) as error:
                is_final = isinstance(error, BlobError | BrokerRefusedError)
                if is_final or now >= under_way.until:
                    devices = ", ".join(sorted(under_way.devices))
                    problems.append(f"blob {digest[:12]} for {devices}: {error}")
                    under_way.chunks = []
            else:
                under_way.until = now + (PUBLISH_SECONDS if under_way.chunks else under_way.seconds)
        return problems

    def _begin(self, digest: str, wanted: _BlobRequests, now: float) -> _UnderWay:
        """Return a blob with the union of the chunks that devices need."""
        served = self._served[digest]
        devices = wanted.devices
        indices: set[int] = set()
        for ranges in devices.values():
            indices.update(indices_of(ranges, served.chunks))
        chunks = sorted(indices)
        seconds = served.payload_bytes(chunks) * len(devices) / FAN_OUT_BYTES
        return _UnderWay(set(devices), chunks, seconds, now + PUBLISH_SECONDS)

    def _publish(self, digest: str, under_way: _UnderWay) -> None:
        """Publish the next window of chunks; after an error the same window is next again."""
        served = self._served[digest]
        published = self._published.setdefault(digest, set())
        if under_way.file is None:
            under_way.again = not published.isdisjoint(under_way.chunks)
            under_way.file = ServedFile(served.path, served.size, digest, served.verified)
        window = under_way.chunks[:SEND_WINDOW]
        chunks = under_way.file.chunks(window, served.chunk_bytes)
        # A chunk that was damaged in transit is detected by its digest or signature.
        with_digests = under_way.again and not self._link.authentic
        overhead = FRAME_OVERHEAD if with_digests else BARE_OVERHEAD
        payload: dict[int, int] = {}

        def messages() -> Iterator[tuple[str, bytes]]:
            for chunk in chunks:
                frame = frame_chunk(chunk, digest=with_digests, pack=True)
                payload[chunk.index] = len(frame) - overhead
                yield self._topics.blob(digest, chunk.index), frame

        self._link.publish_stream(messages(), time.monotonic() + TURN_SECONDS)
        for index in payload.keys() - published:
            self._payload_bytes += payload[index]
        published.update(window)
        del under_way.chunks[:SEND_WINDOW]
        if not under_way.chunks:
            under_way.file = None

    def take_payload_bytes(self) -> int:
        """Return the payload bytes published since the last call, in packed form.

        A chunk that is published again is not counted again.
        """
        payload_bytes = self._payload_bytes
        self._payload_bytes = 0
        return payload_bytes
