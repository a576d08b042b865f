"""The processes that hold a bench's devices: each runs a swarm until its standard input closes,
then tells its bytes.

Run as a module: ``python -m shoal.bench.processes <light|bare> <fleet> <broker url> <first>
<stop>``.
"""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import pairwise

from fleet_protocol import messages
from fleet_protocol.blobs import DEFAULT_CHUNK_BYTES, decode_chunk, iter_chunks, ranges_of
from fleet_protocol.child_process import python_module, when_parent_ends
from fleet_protocol.digests import blob_digest, matches
from fleet_protocol.errors import BlobError
from fleet_protocol.lean_client import LeanClient
from fleet_protocol.mapped_tensors import tensors_in
from fleet_protocol.messages.bounds import CHUNKS_LIMIT
from fleet_protocol.topics import BlobTopic, Topics
from fleet_protocol.transport import BrokerAddress, Farewell
from fleet_protocol.weights import weights_parts
from shoal.bench.bare import bare_member
from shoal.bench.swarm import Member, Swarm

_END_SECONDS = 10.0
REPAIR_SECONDS = 2.0
RETRY_SECONDS = 5.0
LASTING_SECONDS = 1.0  # that a state lasts before it is told, as on a board

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

_decoded = lru_cache(2)(tensors_in)  # for all devices of a process


@lru_cache(2)
def _frames(weights: bytes, header_bytes: int, chunk_bytes: int) -> tuple[bytes, ...]:
    """An update as it travels but for its header, which alone differs between the devices of a
    process.
    """
    data = b"".join((bytes(header_bytes), *weights_parts(_decoded(weights))[2:]))
    return tuple(
        frame for _, frame in iter_chunks(data, chunk_bytes, ((0, CHUNKS_LIMIT),), digests=False)
    )


def _status(state: str, *, online: bool = True) -> bytes:
    return messages.DeviceStatus(online=online, state=state).to_bytes()


class LightDevice:
    """One device; `whole` are the blobs of this process that arrived whole, each verified once for
    all its devices.
    """

    def __init__(self, member: Member, whole: dict[str, bytes]) -> None:
        self._member = member
        self._topics = member.topics
        self._whole = whole
        self._offer: messages.Offer | None = None
        self._done: tuple[bytes, messages.BlobRef, list[bytes | memoryview]] | None = None
        self._held: list[str] = []
        self._refs: dict[str, messages.BlobRef] = {}
        self._parts: dict[str, dict[int, bytes]] = {}
        self._moved = 0.0
        self._patience = REPAIR_SECONDS
        self._state = self._said = "idle"
        self._lasts_at = 0.0

    # What the swarm calls.

    def on_connected(self) -> None:
        """Listen for tasks and for what is being fetched, and say what this device is: the session
        is a new one.
        """
        for wanted in (
            self._topics.task(self._member.name),
            *map(self._topics.blob_filter, self._refs),
        ):
            self._member.subscribe(wanted)
        said = messages.DeviceProfile(profile=_PROFILE)
        self._member.publish(self._topics.profile(self._member.name), said.to_bytes(), retain=True)
        self._tell_state()

    def on_message(self, topic: str, payload: bytes) -> None:
        """A chunk, or a word of the server."""
        where = self._topics.parse(topic)
        if isinstance(where, BlobTopic):
            self._chunk(where.digest, payload)
            return
        message = messages.parse_server_message(payload)
        if isinstance(message, messages.Offer):
            self._take(message)
        elif self._offer is None or message.task != self._offer.task:
            return
        elif isinstance(message, messages.UploadMissing):
            self._upload_again(message.ranges)
        elif isinstance(message, messages.UploadAck | messages.UploadRefused | messages.Cancel):
            self._end()

    def on_tick(self, now: float) -> None:
        """Tell a state that has lasted, ask again for chunks, or announce again."""
        if self._said != self._state and now >= self._lasts_at:
            self._tell_state()
        if self._done is not None and now - self._moved >= RETRY_SECONDS:
            self._announce()
        elif self._refs and now - self._moved >= self._patience:
            self._patience *= (
                2  # what is under way to many must not be asked for by each of them again and again
            )
            for digest in list(self._refs):
                self._ask(digest)

    # The protocol.

    def _enter(self, state: str) -> None:
        self._state, self._lasts_at = state, time.monotonic() + LASTING_SECONDS

    def _tell_state(self) -> None:
        self._said = self._state
        self._member.publish(
            self._topics.status(self._member.name), _status(self._state), retain=True
        )

    def _send(
        self,
        kind: type[messages.Accept | messages.NeedChunks | messages.Done],
        **fields: object,
    ) -> None:
        self._member.publish(
            self._topics.reply(self._member.name),
            self._message(kind, **fields).to_bytes(),
        )

    def _message(
        self,
        kind: type[messages.Accept | messages.NeedChunks | messages.Done],
        **fields: object,
    ) -> messages.Accept | messages.NeedChunks | messages.Done:
        offer = self._offer
        if offer is None:
            raise RuntimeError(
                "a light device speaks about a task that it does not have; this is a bug"
            )
        return kind.model_validate({"task": offer.task, **fields})

    def _take(self, offer: messages.Offer) -> None:
        if self._offer is not None and self._offer.task == offer.task:
            return
        self._end(quiet=True)
        self._offer = offer
        choice = offer.choices[0]
        offered = {"artifact_set": choice.artifact_set, "weights": choice.weights}
        missing = {name: ref for name, ref in offered.items() if ref.digest not in self._held}
        for ref in missing.values():
            self._refs[ref.digest], self._parts[ref.digest] = ref, {}
            self._member.subscribe(self._topics.blob_filter(ref.digest))
        self._moved = time.monotonic()
        self._send(messages.Accept, lacks=tuple(missing))
        self._work()

    def _ask(self, digest: str) -> None:
        self._moved = time.monotonic()
        missing = set(range(self._refs[digest].chunks)) - self._parts[digest].keys()
        self._send(messages.NeedChunks, digest=digest, ranges=ranges_of(missing))

    def _chunk(self, digest: str, frame: bytes) -> None:
        ref = self._refs.get(digest)
        if ref is None:
            return
        self._moved = time.monotonic()
        if digest in self._whole:
            self._parts[digest][int.from_bytes(frame[4:8], "big")] = b""
        else:
            try:
                chunk = decode_chunk(frame)
            except BlobError:
                return
            self._parts[digest][chunk.index] = bytes(chunk.payload)
        if len(self._parts[digest]) == ref.chunks:
            self._finish(digest, ref)

    def _finish(self, digest: str, ref: messages.BlobRef) -> None:
        if digest not in self._whole:
            data = b"".join(self._parts[digest][index] for index in range(ref.chunks))
            if not matches(data, digest):
                self._parts[digest].clear()
                self._ask(digest)
                return
            self._whole[digest] = data
        del self._refs[digest], self._parts[digest]
        self._patience = REPAIR_SECONDS
        self._held = [*self._held[-3:], digest]
        self._member.unsubscribe(self._topics.blob_filter(digest))
        self._work()

    def _work(self) -> None:
        offer = self._offer
        if offer is None or self._refs:
            return
        choice = offer.choices[0]
        metadata = {
            "task": offer.task,
            "run": offer.run,
            "round": str(offer.round),
            "version": str(offer.version),
            "tier": choice.tier,
        }
        parts = weights_parts(_decoded(self._whole[choice.weights.digest]), metadata)
        metrics = messages.TaskMetrics(
            examples=1,
            batches=1,
            labels=(0,),
            fetch_seconds=0.0,
            train_seconds=0.0,
            resident_bytes=0,
        )
        size = choice.weights.chunk_bytes or DEFAULT_CHUNK_BYTES
        update = messages.BlobRef(
            digest=blob_digest(*parts), size=sum(map(len, parts)), chunk_bytes=size
        )
        done = self._message(messages.Done, update=update, tier=choice.tier, metrics=metrics)
        self._done = (done.to_bytes(), update, parts)
        self._enter("uploading")
        header = b"".join(parts[:2])
        like, *rest = _frames(self._whole[choice.weights.digest], len(header), size)
        first = bytearray(like)
        at = len(like) - min(size, update.size)
        first[at : at + len(header)] = header
        self._upload(enumerate((first, *rest)))

    def _upload_again(self, ranges: messages.Ranges) -> None:
        if self._done is not None:
            _, update, parts = self._done
            self._upload(iter_chunks(b"".join(parts), update.chunk_bytes, ranges))

    def _upload(self, frames: Iterable[tuple[int, bytes | bytearray]]) -> None:
        if self._offer is None:
            return
        for index, frame in frames:
            self._member.publish(self._topics.upload(self._offer.task, index), frame)
        self._announce()

    def _announce(self) -> None:
        if self._done is not None:
            self._moved = time.monotonic()
            self._member.publish(self._topics.reply(self._member.name), self._done[0])

    def _end(self, *, quiet: bool = False) -> None:
        for digest in self._refs:
            self._member.unsubscribe(self._topics.blob_filter(digest))
        self._offer = None
        self._done = None
        self._refs.clear()
        self._parts.clear()
        if not quiet:
            self._enter("idle")


def light_member(topics: Topics, name: str, whole: dict[str, bytes]) -> Member:
    """A light device with its connection."""
    member = Member(
        topics,
        name,
        Farewell(topics.status(name), _status("gone", online=False)),
        LeanClient,
    )
    member.behaviour = LightDevice(member, whole)
    return member


def device_name(index: int) -> str:
    """Name of a device of a bench."""
    return f"light-{index:05d}"


@contextlib.contextmanager
def device_processes(
    kind: str, fleet: str, broker: str, devices: int, processes: int
) -> Iterator[Counter[str]]:
    """Devices, ``light`` ones or those of the baseline, in processes that live as long as the
    context.

    At its end it has the bytes of payloads and topics that they exchanged, by kind of topic and
    way.
    """
    exchanged: Counter[str] = Counter()
    bounds = [devices * index // processes for index in range(processes + 1)]
    children = [
        subprocess.Popen(  # noqa: S603  (our own module, arguments are ours)
            python_module("shoal.bench.processes", kind, fleet, broker, str(first), str(stop)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for first, stop in pairwise(bounds)
    ]
    try:
        yield exchanged
    finally:
        for child in children:
            try:
                output, _ = child.communicate(b"", timeout=_END_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                output, _ = child.communicate()
            if output:
                exchanged.update(json.loads(output))


def _main(kind: str, fleet: str, broker: str, first: str, stop: str) -> None:
    ended = threading.Event()
    when_parent_ends(ended.set)
    topics = Topics(fleet)
    whole = dict[str, bytes]()
    names = [device_name(index) for index in range(int(first), int(stop))]
    members = [
        light_member(topics, name, whole) if kind == "light" else bare_member(topics, name)
        for name in names
    ]
    Swarm(members, BrokerAddress.parse(broker)).run(ended.is_set)
    count: Counter[str] = Counter()
    for member in members:
        count.update(member.bytes_by_kind)
    print(json.dumps(count))


if __name__ == "__main__":
    _main(*sys.argv[1:])
