"""A device of a benchmark, which uses the whole protocol of a board but does not train."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from fleet_protocol import messages
from fleet_protocol.blobs import (
    DEFAULT_CHUNK_BYTES,
    decode_chunk,
    iter_chunks,
    ranges_of,
)
from fleet_protocol.digests import blob_digest, matches
from fleet_protocol.errors import BlobError
from fleet_protocol.lean_client import LeanClient
from fleet_protocol.mapped_tensors import tensors_in
from fleet_protocol.messages.bounds import CHUNKS_LIMIT
from fleet_protocol.topics import BlobTopic, Topics
from fleet_protocol.transport import Farewell
from fleet_protocol.weights import weights_parts
from shoal.bench.swarm import SwarmClient

# Without progress for so long, a device requests missing chunks, or repeats its announcement.
REPAIR_SECONDS = 2.0
RETRY_SECONDS = 5.0
LASTING_SECONDS = 1.0  # seconds that a state lasts before the device publishes it, as on a board
# A board's cache is bounded, too; the oldest blob leaves first and is fetched again if needed.
_BLOBS_KEPT = 4

_PROFILE = messages.Profile(
    arch="light",
    system="bench",
    cores=1,
    ram_bytes=0,
    free_ram_bytes=0,
    backends={"none": "0"},
    runtime_version="0",
    python="3",
    max_width=1.0,
    examples=1,
)
_METRICS = messages.TaskMetrics(
    examples=1,
    batches=1,
    labels=(0,),
    fetch_seconds=0.0,
    train_seconds=0.0,
    resident_bytes=0,
)

DeviceMessage = messages.Accept | messages.NeedChunks | messages.Done
Frames = Iterable[tuple[int, bytes | bytearray]]
"""Encoded chunks with their indices."""

_decoded = lru_cache(2)(tensors_in)  # shared by all devices of a process


@lru_cache(2)
def _shared_frames(weights: bytes, header_bytes: int, chunk_bytes: int) -> tuple[bytes, ...]:
    """Return an encoded update without its header.

    Only the header differs between the devices of a process, so they share all other chunks.
    """
    # The first two buffers are the length of the header, and the header.
    update = b"".join((bytes(header_bytes), *weights_parts(_decoded(weights))[2:]))
    every_chunk = ((0, CHUNKS_LIMIT),)
    frames = iter_chunks(update, chunk_bytes, every_chunk, digests=False)
    return tuple(frame for _index, frame in frames)


@dataclass(frozen=True)
class _Update:
    """An announced update.

    Attributes:
        announcement: the message that announces it.
        ref: the update as a blob.
        buffers: its bytes.
    """

    announcement: bytes
    ref: messages.BlobRef
    buffers: list[bytes | memoryview]


class LightDevice:
    """One device.

    Args:
        client: its connection.
        whole: blobs of this process that arrived whole, by digest; each is verified once for all
            its devices.
    """

    def __init__(self, client: SwarmClient, whole: dict[str, bytes]) -> None:
        self._client = client
        self._topics = client.topics
        self._whole = whole
        self._offer: messages.Offer | None = None
        self._update: _Update | None = None
        self._held: list[str] = []  # digests of the blobs that this device has, newest last
        self._refs: dict[str, messages.BlobRef] = {}  # blobs that are being fetched
        self._chunks: dict[str, dict[int, bytes]] = {}  # those of them that have come
        self._moved_at = 0.0  # ``time.monotonic()`` of the last progress
        self._patience = REPAIR_SECONDS
        self._state = "idle"
        self._told_state = "idle"
        self._lasts_at = 0.0

    # The swarm calls these.

    def on_connected(self) -> None:
        """Subscribe to tasks and to the blobs being fetched, because the session is new."""
        name = self._client.name
        self._client.subscribe(self._topics.task(name))
        for digest in self._refs:
            self._client.subscribe(self._topics.blob_filter(digest))
        self._publish_profile()

    def on_message(self, topic: str, payload: bytes) -> None:
        """Handle a chunk, or a message of the server."""
        parsed = self._topics.parse(topic)
        if isinstance(parsed, BlobTopic):
            self._receive_chunk(parsed.digest, payload)
            return
        message = messages.parse_server_message(payload)
        if isinstance(message, messages.Offer):
            self._begin(message)
        elif isinstance(message, messages.Introduce):
            self._publish_profile()
        elif isinstance(message, messages.TaskAnswer):
            self._on_answer(message)

    def _on_answer(self, message: messages.TaskAnswer) -> None:
        """Handle a message of the server about a task that it offered."""
        if self._offer is None or message.task != self._offer.task:
            return
        if isinstance(message, messages.UploadMissing):
            self._upload_again(message.ranges)
        elif isinstance(message, messages.UploadAck | messages.UploadRefused | messages.Cancel):
            self._forget()
            self._enter("idle")

    def on_tick(self, now: float) -> None:
        """Publish a state that has lasted, request missing chunks, or repeat an announcement."""
        if self._told_state != self._state and now >= self._lasts_at:
            self._publish_state()
        # The announcement or the server's reply to it may be lost; the server replies to each.
        if self._update is not None and now - self._moved_at >= RETRY_SECONDS:
            self._announce()
        elif self._refs and now - self._moved_at >= self._patience:
            # Chunks on their way to many devices must not be requested repeatedly by each of them.
            self._patience *= 2
            for digest in list(self._refs):
                self._ask(digest)

    # Messages.

    def _enter(self, state: str) -> None:
        self._state = state
        self._lasts_at = time.monotonic() + LASTING_SECONDS

    def _publish_profile(self) -> None:
        """Publish the description and the state of this device."""
        profile = messages.DeviceProfile(profile=_PROFILE)
        topic = self._topics.profile(self._client.name)
        self._client.publish(topic, profile.to_bytes(), retain=True)
        self._publish_state()

    def _publish_state(self) -> None:
        self._told_state = self._state
        topic = self._topics.status(self._client.name)
        self._client.publish(topic, _status(self._state), retain=True)

    def _send(self, kind: type[DeviceMessage], **fields: object) -> None:
        topic = self._topics.reply(self._client.name)
        self._client.publish(topic, self._message(kind, **fields).to_bytes())

    def _message(self, kind: type[DeviceMessage], **fields: object) -> DeviceMessage:
        """Return a message about the current task."""
        if self._offer is None:
            raise RuntimeError(
                "a light device sends a message about a task that it does not have; this is a bug"
            )
        return kind.model_validate({"task": self._offer.task, **fields})

    # Fetching.

    def _begin(self, offer: messages.Offer) -> None:
        """Accept an offer, and fetch the blobs that this device lacks."""
        if self._offer is not None and self._offer.task == offer.task:
            return  # a repeated offer; the timer requests missing chunks
        self._forget()
        self._offer = offer
        # A benchmark has only one tier.
        choice = offer.choices[0]
        offered = {"artifact_set": choice.artifact_set, "weights": choice.weights}
        missing = {name: ref for name, ref in offered.items() if ref.digest not in self._held}
        for ref in missing.values():
            self._refs[ref.digest] = ref
            self._chunks[ref.digest] = {}
            self._client.subscribe(self._topics.blob_filter(ref.digest))
        self._moved_at = time.monotonic()
        self._send(messages.Accept, lacks=tuple(missing))
        # A device that lacks nothing starts at once.
        self._work()

    def _ask(self, digest: str) -> None:
        self._moved_at = time.monotonic()
        missing = set(range(self._refs[digest].chunks)) - self._chunks[digest].keys()
        self._send(messages.NeedChunks, digest=digest, ranges=ranges_of(missing))

    def _receive_chunk(self, digest: str, frame: bytes) -> None:
        ref = self._refs.get(digest)
        if ref is None:
            return
        self._moved_at = time.monotonic()
        chunks = self._chunks[digest]
        # All devices of the process share one verified copy, so a chunk's payload is not needed
        # again.
        if digest in self._whole:
            # Another device of this process has verified the blob: its index is enough.
            chunks[int.from_bytes(frame[4:8], "big")] = b""
        else:
            try:
                chunk = decode_chunk(frame)
            except BlobError:
                return
            chunks[chunk.index] = bytes(chunk.payload)
        if len(chunks) == ref.chunks:
            self._finish_blob(digest, ref)

    def _finish_blob(self, digest: str, ref: messages.BlobRef) -> None:
        if digest not in self._whole:
            chunks = self._chunks[digest]
            data = b"".join(chunks[index] for index in range(ref.chunks))
            # A chunk was damaged in transit, so request all of them again.
            if not matches(data, digest):
                chunks.clear()
                self._ask(digest)
                return
            self._whole[digest] = data
        del self._refs[digest]
        del self._chunks[digest]
        self._patience = REPAIR_SECONDS
        self._held = [*self._held, digest][-_BLOBS_KEPT:]
        self._client.unsubscribe(self._topics.blob_filter(digest))
        self._work()

    # Uploading.

    def _work(self) -> None:
        """Send the weights back as the update once every blob has arrived."""
        offer = self._offer
        if offer is None or self._refs:
            return
        choice = offer.choices[0]
        weights = self._whole[choice.weights.digest]
        metadata = {
            "task": offer.task,
            "run": offer.run,
            "round": str(offer.round),
            "version": str(offer.version),
            "tier": choice.tier,
        }
        # The metadata names the task, so every device's update has its own digest.
        buffers = weights_parts(_decoded(weights), metadata)
        ref = messages.BlobRef(
            digest=blob_digest(*buffers),
            size=sum(map(len, buffers)),
            chunk_bytes=choice.weights.chunk_bytes or DEFAULT_CHUNK_BYTES,
        )
        done = self._message(
            messages.Done,
            update=ref,
            tier=choice.tier,
            metrics=_METRICS,
        )
        self._update = _Update(done.to_bytes(), ref, buffers)
        self._enter("uploading")
        self._upload(_own_frames(weights, self._update))

    def _upload_again(self, ranges: messages.Ranges) -> None:
        if self._update is not None:
            data = b"".join(self._update.buffers)
            self._upload(iter_chunks(data, self._update.ref.chunk_bytes, ranges))

    def _upload(self, frames: Frames) -> None:
        if self._offer is None:
            return
        # No waiting: paho keeps messages that the broker has not accepted yet.
        for index, frame in frames:
            self._client.publish(self._topics.upload(self._offer.task, index), frame)
        self._announce()

    def _announce(self) -> None:
        if self._update is not None:
            self._moved_at = time.monotonic()
            topic = self._topics.reply(self._client.name)
            self._client.publish(topic, self._update.announcement)

    def _forget(self) -> None:
        """Drop the current task."""
        for digest in self._refs:
            self._client.unsubscribe(self._topics.blob_filter(digest))
        self._offer = None
        self._update = None
        self._refs.clear()
        self._chunks.clear()


def _own_frames(weights: bytes, update: _Update) -> Frames:
    """Return the chunks of one device's update: the shared ones, with its header in the first.

    The header has the same length for all devices of a process.
    """
    header = b"".join(update.buffers[:2])
    chunk_bytes = update.ref.chunk_bytes
    shared, *later = _shared_frames(weights, len(header), chunk_bytes)
    first = bytearray(shared)
    # A frame has its own header before the payload; its length is the remainder.
    payload_start = len(shared) - min(chunk_bytes, update.ref.size)
    first[payload_start : payload_start + len(header)] = header
    return enumerate((first, *later))


def _status(state: str, *, online: bool = True) -> bytes:
    return messages.DeviceStatus(online=online, state=state).to_bytes()


def light_client(topics: Topics, name: str, whole: dict[str, bytes]) -> SwarmClient:
    """Return a light device with its connection; `whole` is that of `LightDevice`."""
    will = Farewell(topics.status(name), _status("gone", online=False))
    client = SwarmClient(topics, name, will, LeanClient)
    client.behaviour = LightDevice(client, whole)
    return client
