"""Blobs on request: what several devices wait for is published once and the broker fans it out.

Requests for one blob are collected over a short window, or until every device that was offered the blob has asked;
then the union of the wanted chunks is published. A chunk lost on the way is asked for again by whoever misses it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fleet_protocol.blobs import iter_chunks, ranges_of
from fleet_protocol.errors import BlobError, TransportError
from fleet_protocol.link import Link
from fleet_protocol.manifest import digest_of
from fleet_protocol.messages import NeedChunks
from fleet_protocol.topics import Topics

__all__ = ["BlobService", "Wanted"]

WINDOW_SECONDS = 0.15
PUBLISH_SECONDS = 10.0  # a broker that takes nothing for so long is away; the devices ask again


@dataclass
class Wanted:
    """Requests for one blob that were not served yet.

    Attributes:
        since: ``time.monotonic()`` of the first.
        chunks: indices asked for.
        devices: who asked.
    """

    since: float
    chunks: set[int] = field(default_factory=set)
    devices: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Served:
    path: Path
    size: int
    chunk_bytes: int

    @property
    def chunks(self) -> int:
        return -(-self.size // self.chunk_bytes)


def _payload_bytes(chunks: Iterable[int], size: int, chunk_bytes: int) -> int:
    """Payload bytes of some chunks of a blob.

    Args:
        chunks: indices.
        size: bytes of the blob.
        chunk_bytes: payload bytes of every chunk but the last.
    """
    return sum(max(0, min(chunk_bytes, size - index * chunk_bytes)) for index in chunks)


class BlobService:
    """Publishes blobs that devices ask for.

    Args:
        link: the connection.
        topics: of the fleet.
        chunk_bytes: payload bytes of a chunk.
        window_seconds: how long requests are collected.
    """

    def __init__(self, link: Link, topics: Topics, chunk_bytes: int, window_seconds: float = WINDOW_SECONDS) -> None:
        self._link = link
        self._topics = topics
        self._chunk_bytes = chunk_bytes
        self._window = window_seconds
        self._served: dict[str, _Served] = {}
        self._expected: dict[str, set[str]] = {}
        self._wanted: dict[str, Wanted] = {}
        self._asked: set[tuple[str, str]] = set()
        self._published: dict[str, set[int]] = {}
        self._payload_bytes = 0

    def serve(self, files: Mapping[str, Path]) -> None:
        """Offer files by digest.

        Args:
            files: digest to path; their content must not change.
        """
        for digest, path in files.items():
            self._served[digest] = _Served(path, path.stat().st_size, self._chunk_bytes)

    def withdraw(self, digests: Iterable[str]) -> None:
        """Offer blobs no longer, and forget who got them."""
        gone = set(digests)
        for digest in gone:
            self._served.pop(digest, None)
            self._expected.pop(digest, None)
            self._wanted.pop(digest, None)
            self._published.pop(digest, None)
        self._asked = {key for key in self._asked if key[0] not in gone}

    def expect(self, digest: str, device: str) -> None:
        """A device was offered a blob and will ask for it."""
        self._expected.setdefault(digest, set()).add(device)

    def forget(self, device: str) -> None:
        """A device is gone: nobody waits for its request."""
        for devices in self._expected.values():
            devices.discard(device)

    def asked(self, digest: str, device: str) -> bool:
        """Whether a device asked for a blob before, and so will not again."""
        return (digest, device) in self._asked

    def need(self, message: NeedChunks) -> bool:
        """Take a request.

        Args:
            message: from a device that may have the blob.

        Returns:
            False if there is no such blob.
        """
        served = self._served.get(message.digest)
        if served is None:
            return False
        chunks = {index for start, stop in message.ranges for index in range(max(0, start), min(stop, served.chunks))}
        waiting = self._wanted.setdefault(message.digest, Wanted(time.monotonic()))
        waiting.chunks |= chunks
        waiting.devices.add(message.device)
        self._expected.get(message.digest, set()).discard(message.device)
        self._asked.add((message.digest, message.device))
        return True

    def next_due(self) -> float | None:
        """When `flush` has something to do, on the monotonic clock."""
        return min((self._due(digest, wanted) for digest, wanted in self._wanted.items()), default=None)

    def _due(self, digest: str, wanted: Wanted) -> float:
        # Of graphs nobody knows who will ask (a board may have them), so only weights can be served before the window.
        everyone_asked = digest in self._expected and not self._expected[digest]
        return wanted.since if everyone_asked else wanted.since + self._window

    def flush(self, now: float) -> list[str]:
        """Publish everything that is due.

        Args:
            now: ``time.monotonic()``.

        Returns:
            Problems for the log: the broker does not take the chunks, or a file cannot be read. The devices ask
            again, so none of them ends a round.
        """
        problems = []
        for digest in [digest for digest, wanted in self._wanted.items() if self._due(digest, wanted) <= now]:
            wanted, served = self._wanted.pop(digest), self._served[digest]
            try:
                data = _checked(served.path, digest)
                self._link.publish_stream(
                    self._messages(data, digest, served.chunk_bytes, wanted.chunks),
                    time.monotonic() + PUBLISH_SECONDS,
                )
                known = self._published.setdefault(digest, set())
                self._payload_bytes += _payload_bytes(wanted.chunks - known, served.size, served.chunk_bytes)
                known |= wanted.chunks
            except (TransportError, BlobError) as error:
                problems.append(f"blob {digest[:12]} for {', '.join(sorted(wanted.devices))}: {error}")
        return problems

    def _messages(self, data: bytes, digest: str, chunk_bytes: int, chunks: set[int]) -> Iterator[tuple[str, bytes]]:
        for index, frame in iter_chunks(data, chunk_bytes, ranges_of(chunks)):
            yield self._topics.blob(digest, index), frame

    def take_payload_bytes(self) -> int:
        """Payload bytes published since the last call; a chunk that is published again counts no more."""
        taken, self._payload_bytes = self._payload_bytes, 0
        return taken


def _checked(path: Path, digest: str) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BlobError(f"cannot read {path}: {error.strerror}") from error
    if digest_of(data) != digest:
        raise BlobError(f"{path} was changed on disk; it no longer has the digest that was offered")
    return data
