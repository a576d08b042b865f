"""Publishes blobs on request: once for all devices that wait, and the broker fans them out.

Requests for one blob are collected until every device that was offered it has asked, or has said
that it will not; or, where one stays silent, until no request has come for a moment. Then the union
of the wanted chunks is published. A device asks again for a chunk that was lost on the way. It is
published again when those before it have reached everybody: a thousand devices that wait must not
each bring about another thousand copies. A blob goes out a window of chunks at a time, and what
came in is handled in between: the broker's acknowledgements wait behind it.
"""

import math
import mmap
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fleet_protocol.blobs import BARE_OVERHEAD, FRAME_OVERHEAD, indices_of, iter_chunks, ranges_of
from fleet_protocol.digests import matches
from fleet_protocol.errors import BlobError, BrokerRefusedError, TransportError
from fleet_protocol.foreign_files import file_state, open_regular
from fleet_protocol.messages import Ranges
from fleet_protocol.messages.bounds import CHUNKS_LIMIT
from fleet_protocol.topics import Topics
from fleet_protocol.transport import SEND_WINDOW, Transport

WINDOW_SECONDS = 0.15  # without a request, after which those that came are served
PROMISED_SECONDS = 0.5  # the same where a device that was offered the blob has not answered yet
LONGEST_SECONDS = 2.0  # after the first request, however many still come
# that a broker hands out in a second; until then what is published is on its way
FAN_OUT_BYTES = 50e6
GAP_SECONDS = 1.0  # since the last arrival: so long it is still on its way
PUBLISH_SECONDS = 10.0  # a broker that takes nothing for so long is away; the devices ask again
TURN_SECONDS = 0.2  # that its acknowledgements are waited for at once


@dataclass
class _Wanted:
    """Requests for one blob that were not served yet.

    Attributes:
        since: ``time.monotonic()`` of the first.
        last: the same of the newest.
        devices: which chunks each device has asked for.
    """

    since: float
    last: float
    devices: dict[str, Ranges] = field(default_factory=dict)


@dataclass
class _UnderWay:
    """A blob that is published, and on its way.

    Attributes:
        devices: that asked for it, and have not begun to work yet.
        chunks: indices of those that are still to be published.
        seconds: that a broker takes to hand all of them out.
        until: ``time.monotonic()`` when it is given up if none is published, later when it has
            arrived.
        data: the file, mapped from the first chunk to the last: one that is removed meanwhile stays
            readable.
        again: whether some of the chunks were published before.
    """

    devices: set[str]
    chunks: list[int]
    seconds: float
    until: float
    data: memoryview | None = None
    again: bool = False


@dataclass(frozen=True)
class _Served:
    """A file that is offered; `verified` are the states of it that had the digest."""

    path: Path
    size: int
    chunk_bytes: int
    verified: set[tuple[int, ...]] = field(default_factory=set)

    @property
    def chunks(self) -> int:
        return -(-self.size // self.chunk_bytes)

    def payload_bytes(self, chunks: Iterable[int]) -> int:
        """Return the payload bytes of some chunks, of which the last may be short."""
        total = 0
        for index in chunks:
            total += max(0, min(self.chunk_bytes, self.size - index * self.chunk_bytes))
        return total


class BlobService:
    """Publishes blobs that devices ask for.

    Args:
        link: the connection to the broker.
        topics: of the fleet.
        chunk_bytes: payload bytes of a chunk, unless `serve` says otherwise.
    """

    def __init__(self, link: Transport, topics: Topics, chunk_bytes: int) -> None:
        self._link = link
        self._topics = topics
        self._chunk_bytes = chunk_bytes
        self._served: dict[str, _Served] = {}
        self._expected: dict[str, set[str]] = {}  # devices that may still ask, by digest
        self._by_device: dict[str, set[str]] = {}  # digests of the same, by device
        self._wanted: dict[str, _Wanted] = {}
        self._asked: set[tuple[str, str]] = set()  # digest and device
        self._published: dict[str, set[int]] = {}  # indices of chunks, by digest
        self._under_way: dict[str, _UnderWay] = {}
        self._payload_bytes = 0

    def serve(self, files: Mapping[str, Path], chunk_bytes: int | None = None) -> None:
        """Offer files whose content does not change.

        Args:
            files: by digest.
            chunk_bytes: payload bytes of their chunks; None for the usual.
        """
        for digest, path in files.items():
            served = self._served.get(digest)
            if served is None or served.path != path:
                size = path.stat().st_size
                self._served[digest] = _Served(path, size, chunk_bytes or self._chunk_bytes)

    def withdraw(self, digests: Iterable[str]) -> None:
        """Offer blobs no longer, and forget which devices got them."""
        withdrawn = set(digests)
        for digest in withdrawn:
            self._served.pop(digest, None)
            self._expected.pop(digest, None)
            self._wanted.pop(digest, None)
            self._published.pop(digest, None)
            self._under_way.pop(digest, None)
        # Devices that are offered it again later may ask again.
        self._asked = {key for key in self._asked if key[0] not in withdrawn}

    def expect(self, digest: str, device: str) -> None:
        """Wait for the request of a device that was offered a blob, or for it to have the blob."""
        self._expected.setdefault(digest, set()).add(device)
        self._by_device.setdefault(device, set()).add(digest)

    def forget(self, device: str, but: Collection[str] = ()) -> None:
        """Wait for no more requests of a device, but for these.

        It is gone, or has the blobs, or took another tier.
        """
        for digest in self._by_device.pop(device, set()).difference(but):
            self._expected.get(digest, set()).discard(device)

    def note_work(self, device: str) -> None:
        """Note that a device has begun its work.

        It wants nothing more, and what others wait for is still on its way to them.
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
        """Return whether a device asked for a blob before, and so will not again."""
        return (digest, device) in self._asked

    def request(self, device: str, digest: str, ranges: Ranges = ((0, CHUNKS_LIMIT),)) -> bool:
        """Note a request of a device that may have the blob.

        Args:
            device: that asks.
            digest: of the blob.
            ranges: of the wanted chunks; all of them by default.

        Returns:
            Whether the blob is offered.
        """
        if digest not in self._served:
            return False
        now = time.monotonic()
        wanted = self._wanted.setdefault(digest, _Wanted(now, now))
        wanted.last = now
        wanted.devices[device] = ranges
        self._expected.get(digest, set()).discard(device)
        self._asked.add((digest, device))
        return True

    def next_due(self) -> float | None:
        """Return the ``time.monotonic()`` when `flush` has something to do, None for never."""
        if any(under_way.chunks for under_way in self._under_way.values()):
            return -math.inf
        due = [self._due(digest, wanted) for digest, wanted in self._wanted.items()]
        return min(due, default=None)

    def _due(self, digest: str, wanted: _Wanted) -> float:
        under_way = self._under_way.get(digest)
        arrived = 0.0 if under_way is None else under_way.until
        return max(arrived, self._complete(digest, wanted))

    def _complete(self, digest: str, wanted: _Wanted) -> float:
        """Return when the requests for a blob count as complete."""
        if digest not in self._expected:  # a graph: nobody knows who will ask, a board may have it
            return min(wanted.last + WINDOW_SECONDS, wanted.since + LONGEST_SECONDS)
        if not self._expected[digest]:
            return wanted.since
        return min(wanted.last + PROMISED_SECONDS, wanted.since + LONGEST_SECONDS)

    def flush(self, now: float) -> list[str]:
        """Publish a window of everything that is due at a ``time.monotonic()``.

        Returns:
            Problems for the log: the broker does not take the chunks, or a file cannot be read. The
                devices ask again, so none of them ends a round.
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

    def _begin(self, digest: str, wanted: _Wanted, now: float) -> _UnderWay:
        """Return a blob with the union of the chunks that devices want of it."""
        served = self._served[digest]
        devices = wanted.devices
        indices: set[int] = set()
        for ranges in devices.values():
            indices.update(indices_of(ranges, served.chunks))
        chunks = sorted(indices)
        seconds = served.payload_bytes(chunks) * len(devices) / FAN_OUT_BYTES
        return _UnderWay(set(devices), chunks, seconds, now + PUBLISH_SECONDS)

    def _publish(self, digest: str, under_way: _UnderWay) -> None:
        """Publish the next window of chunks; after an error the same is the next again."""
        served = self._served[digest]
        published = self._published.setdefault(digest, set())
        if under_way.data is None:
            under_way.again = not published.isdisjoint(under_way.chunks)
            under_way.data = _mapped(served, digest)
        window = under_way.chunks[:SEND_WINDOW]
        # A chunk that was damaged on its way is found out by its digest, or by its signature.
        with_digests = under_way.again and not self._link.authentic
        frames = iter_chunks(
            under_way.data,
            served.chunk_bytes,
            ranges_of(window),
            digests=with_digests,
            pack=True,
        )
        overhead = FRAME_OVERHEAD if with_digests else BARE_OVERHEAD
        payload: dict[int, int] = {}

        def messages() -> Iterator[tuple[str, bytes]]:
            for index, frame in frames:
                payload[index] = len(frame) - overhead
                yield self._topics.blob(digest, index), frame

        self._link.publish_stream(messages(), time.monotonic() + TURN_SECONDS)
        for index in payload.keys() - published:
            self._payload_bytes += payload[index]
        published.update(window)
        del under_way.chunks[:SEND_WINDOW]
        if not under_way.chunks:
            under_way.data = None

    def take_payload_bytes(self) -> int:
        """Return the payload bytes published since the last call, packed.

        A chunk that is published again counts no more.
        """
        payload_bytes = self._payload_bytes
        self._payload_bytes = 0
        return payload_bytes


def _mapped(served: _Served, digest: str) -> memoryview:
    """Return the bytes of a blob, from the page cache, for as long as somebody has them.

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
