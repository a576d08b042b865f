"""A Mosquitto with a listener who hears everything, and a search for numbers in what was heard."""

import contextlib
import queue
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.blobs import decode_chunk
from fleet_protocol.encodings import ENCODINGS, KEEP
from fleet_protocol.errors import BlobError
from fleet_protocol.link import Link
from fleet_protocol.mapped_tensors import tensors_in
from fleet_protocol.rounding import LEVELS, round_to_levels, to_half
from fleet_protocol.sparse import count_kept, largest_places
from fleet_protocol.transport import BrokerAddress, Received
from tests.brokers import TestBroker, mosquitto_broker

PATIENCE_SECONDS = 60.0
END = "overhearing/end"
SHORTEST_BYTES = 8
"""Shorter strings occur by chance."""

Array = NDArray[Any]


@dataclass
class Listener:
    """All messages that a broker delivered.

    Attributes:
        messages: topic and payload of each.
    """

    messages: list[tuple[str, bytes]] = field(default_factory=list)

    def _blobs(self, channel: str) -> dict[str, bytes]:
        """The blobs of a channel, put together from their chunks."""
        chunks: dict[str, dict[int, bytes]] = {}
        for topic, payload in self.messages:
            parts = topic.split("/")
            if len(parts) > 3 and parts[3] == channel and payload:
                # A server tries with zeros how large a message may be.
                with contextlib.suppress(BlobError):
                    chunk = decode_chunk(payload)
                    chunks.setdefault(parts[4], {})[chunk.index] = bytes(chunk.payload)
        return {name: b"".join(found[i] for i in sorted(found)) for name, found in chunks.items()}

    @property
    def updates(self) -> list[dict[str, Array]]:
        """Everything that boards uploaded, as tensors by name."""
        return [tensors_in(data) for data in self._blobs("uploads").values()]

    @property
    def said_by_boards(self) -> list[bytes]:
        """Whatever boards sent: chunks, messages, statuses and profiles."""
        sent = list(self._blobs("uploads").values())
        for topic, payload in self.messages:
            if topic.endswith(("/reply", "/status", "/profile")) or "/uploads/" in topic:
                sent.append(payload)
        return sent

    @property
    def haystacks(self) -> list[bytes]:
        """All messages and blobs, and what packed parts of updates unpack to."""
        found = [payload for _, payload in self.messages]
        found += [*self._blobs("uploads").values(), *self._blobs("blobs").values()]
        for update in self.updates:
            found += unpacked(update)
        return found


def unpacked(update: Mapping[str, Array]) -> list[bytes]:
    """What the parts of an update may unpack to: nothing if they are not packed."""
    found: list[bytes] = []
    for part in update.values():
        with contextlib.suppress(zlib.error):
            data = zlib.decompress(part.tobytes(), wbits=-15)
            # The bytes of 16 bits are sent as all lower ones and then all upper ones.
            both = np.frombuffer(data[: len(data) // 2 * 2], np.uint8).reshape(2, -1)
            found += [data, np.ascontiguousarray(both.T).tobytes(), nibbles(data).tobytes()]
    return found


def nibbles(data: bytes) -> Array:
    """Two signed numbers for each byte, the lower half first."""
    packed = np.frombuffer(data, np.uint8)
    halves = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1).astype(np.int8)
    return np.where(halves > 7, halves - 16, halves).astype(np.int8)


def spellings(tensor: Array) -> Iterator[bytes]:
    """The bytes of a tensor in every encoding: of each row, and of the scales of its blocks."""
    for encoding in ENCODINGS:
        if encoding in LEVELS:
            flat = tensor.reshape(-1)
            if encoding == "topk":
                flat = flat[largest_places(flat, count_kept(flat.size, KEEP))]
            parts = round_to_levels({"": flat}, encoding, at_random=False)
            yield parts["scales"].tobytes()
            values = parts["values"]
            if encoding == "int4":
                values = nibbles(values.tobytes())[: flat.size]
        else:
            values = tensor if encoding == "fp32" else to_half(tensor, encoding)
        has_rows = tensor.ndim > 1 and encoding != "topk"
        for row in values.reshape(len(tensor) if has_rows else 1, -1):
            # Rounded to few levels, a row may be all zeros.
            if len(np.unique(row)) > 4:
                yield row.tobytes()


def occurrences(haystacks: list[bytes], tensors: Mapping[str, Array]) -> tuple[int, list[str]]:
    """Search for tensors in some bytes.

    Returns:
        Number of strings that were searched for, and the names of the tensors that were found.
    """
    joined = b"\0\xff\0".join(haystacks)
    count = 0
    found: list[str] = []
    for name, tensor in tensors.items():
        for spelling in spellings(tensor):
            if len(spelling) >= SHORTEST_BYTES:
                count += 1
                if spelling in joined:
                    found.append(name)
    return count, found


@contextlib.contextmanager
def overheard(folder: Path) -> Iterator[tuple[TestBroker, Listener]]:
    """A Mosquitto, and a listener who has heard every message when the context ends."""
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    listener = Listener()
    with mosquitto_broker(folder) as broker:
        link = Link(BrokerAddress.parse(broker.url), "listener", inbox)
        link.connect(PATIENCE_SECONDS)
        link.subscribe("#")
        try:
            yield broker, listener
            # A broker delivers in order, so nothing of the fleet comes after this.
            link.publish(END, b"end")
            while True:
                event = inbox.get(timeout=PATIENCE_SECONDS)
                if isinstance(event, Received):
                    if event.topic == END:
                        break
                    listener.messages.append((event.topic, bytes(event.payload)))
        finally:
            link.close()
