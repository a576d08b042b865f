"""A scripted device: it speaks the whole protocol over a real broker, but its training is a
function of the test.

It is what the device runtime would be with a perfect disk and no data: it announces itself, fetches
what an offer names, answers with the tensors that its script returns, and repeats what is not
acknowledged. A script may misbehave.
"""

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from typing_extensions import Self

from fleet_protocol.blobs import blob_ref, decode_chunk, indices_of, iter_chunks, ranges_of
from fleet_protocol.digests import matches
from fleet_protocol.errors import TransportError
from fleet_protocol.link import Link
from fleet_protocol.manifest import Manifest, parse_manifest
from fleet_protocol.mapped_tensors import tensors_in
from fleet_protocol.messages import (
    Accept,
    BlobRef,
    Cancel,
    DeviceProfile,
    DeviceStatus,
    Done,
    NeedChunks,
    Offer,
    Profile,
    Progress,
    Refuse,
    TaskMetrics,
    UploadAck,
    UploadMissing,
    UploadRefused,
    parse_server_message,
)
from fleet_protocol.topics import BlobTopic, Topics
from fleet_protocol.transport import BrokerAddress, Connected, Disconnected, Farewell, Received
from fleet_protocol.weights import encode_weights

CHUNK_BYTES = 1024
RETRY_SECONDS = 1.0


def profile(**changes: Any) -> Profile:
    values: dict[str, Any] = {
        "arch": "x86_64",
        "system": "test",
        "cores": 1,
        "ram_bytes": 10**9,
        "free_ram_bytes": 10**9,
        "backends": {"onnx": "1"},
        "runtime_version": "0",
        "python": "3",
        "max_width": 1.0,
        "examples": 10,
    }
    return Profile(**{**values, **changes})


@dataclasses.dataclass
class Work:
    """What a script is given: an offer with everything it names fetched."""

    offer: Offer
    manifest: Manifest
    weights: Mapping[str, np.ndarray]

    def metadata(self, **changes: str) -> dict[str, str]:
        choice = self.offer.choices[0]
        return {
            "task": self.offer.task,
            "run": self.offer.run,
            "round": str(self.offer.round),
            "version": str(self.offer.version),
            "tier": choice.tier,
        } | changes

    def statistics(self, mean: float, variance: float) -> dict[str, np.ndarray]:
        return {
            f"stat.{spec.name}.{key}": np.full(spec.channels, value, np.float32)
            for spec in self.manifest.statistics
            for key, value in (("mean", mean), ("var", variance))
        }


Script = Callable[["Peer", Work], None]


def honest(
    delta: float = 1.0, *, labels: tuple[int, ...] = (0, 1, 2, 3), examples: int = 10
) -> Script:
    """Returns the weights plus a number, or plain statistics."""

    def script(peer: Peer, work: Work) -> None:
        if work.offer.routine == "statistics":
            tensors = work.statistics(0.0, 1.0)
        else:
            tensors = {name: value + np.float32(delta) for name, value in work.weights.items()}
        peer.send(work, encode_weights(tensors, work.metadata()), labels=labels, examples=examples)

    return script


def silent(_peer: "Peer", _work: Work) -> None:
    """Takes the task and never answers."""


class Peer:
    """One scripted device, running in a thread while the ``with`` block lasts."""

    def __init__(
        self,
        fleet: str,
        device: str,
        url: str,
        script: Script,
        *,
        profile: Profile | None = None,
        announce: bool = True,
    ) -> None:
        self.device = device
        self.topics = Topics(fleet)
        self.script = script
        self.heard: list[Any] = []  # every message of the server to this device
        self.offers: list[Offer] = []
        self.chunks_received = 0
        self.sent_updates = 0
        self._profile = profile if profile is not None else globals()["profile"]()
        self._announce = announce
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        will = Farewell(self.topics.status(device), self._status(online=False))
        self.cut = CHUNK_BYTES
        self.link = Link(
            BrokerAddress.parse(url), f"shoal-{fleet}-{device}", self._inbox, will=will
        )
        self._blobs: dict[str, dict[int, bytes]] = {}
        self._refs: dict[str, BlobRef] = {}
        self._ready: dict[str, bytes] = {}
        self._current: Offer | None = None
        self._started = False
        self._update: tuple[Work, bytes, BlobRef, Done] | None = None
        self._asked = 0.0
        self._announced = 0.0
        self._stopping = threading.Event()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name=f"peer-{device}", daemon=True)

    def __enter__(self) -> Self:
        self.link.connect(10)
        self.link.subscribe(self.topics.task(self.device))
        if self._announce:
            self.say_hello()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._inbox.put(None)
        self._thread.join(10)
        self.link.close(
            farewell=Farewell(self.topics.status(self.device), self._status(online=False))
        )

    def _status(self, *, online: bool) -> bytes:
        return DeviceStatus(
            fleet=self.topics.fleet, device=self.device, online=online, state="idle"
        ).to_bytes()

    def say_hello(self) -> None:
        said = DeviceProfile(fleet=self.topics.fleet, device=self.device, profile=self._profile)
        self.link.publish(self.topics.profile(self.device), said.to_bytes(), retain=True)
        self.link.publish(self.topics.status(self.device), self._status(online=True), retain=True)

    def wait_for(self, predicate: "Callable[[Peer], bool]", timeout_seconds: float = 20.0) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: predicate(self), timeout_seconds), (
                f"{self.device}: {self.heard}"
            )

    def got(self, kind: type) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]

    # The protocol.

    def _loop(self) -> None:
        while not self._stopping.is_set():
            try:
                event = self._inbox.get(timeout=0.2)
            except queue.Empty:
                event = None
            if isinstance(event, Received):
                with self._changed:
                    self._route(event)
                    self._changed.notify_all()
            elif isinstance(event, Connected) and not event.session_present and self._announce:
                self.say_hello()
            elif isinstance(event, Disconnected):
                continue
            self._repeat()

    def _route(self, event: Received) -> None:
        topic = self.topics.parse(event.topic)
        if isinstance(topic, BlobTopic):
            self._chunk(topic.digest, event.payload)
            return
        message = parse_server_message(event.payload)
        self.heard.append(message)
        if isinstance(message, Offer):
            self.offers.append(message)
            self._take(message)
        elif isinstance(message, UploadMissing) and self._update is not None:
            self.upload(self._update[0].offer.task, self._update[1], message.ranges)
            self.reply(self._update[3])
        elif (
            isinstance(message, (UploadAck, UploadRefused, Cancel))
            and self._current is not None
            and message.task == self._current.task
        ):
            self._current = None
            self._update = None

    def _take(self, offer: Offer) -> None:
        if self._update is not None and self._update[0].offer.task == offer.task:
            self.reply(self._update[3])
            return
        self._current = offer
        self._started = False
        self._update = None
        choice = offer.choices[0]
        lacks = [
            name
            for name in ("artifact_set", "weights")
            if getattr(choice, name).digest not in self._ready
        ]
        self._want(choice.artifact_set)
        self._want(choice.weights)
        self._asked = time.monotonic()
        self.reply(Accept(**self.head(offer), tier=choice.tier, lacks=lacks))
        self._go_on()

    def _want(self, ref: BlobRef) -> None:
        if ref.digest not in self._ready and ref.digest not in self._refs:
            self._refs[ref.digest] = ref
            self._blobs[ref.digest] = {}
            self.link.subscribe(self.topics.blob_filter(ref.digest))

    def _ask(self, ref: BlobRef) -> None:
        if ref.digest in self._ready or self._current is None:
            return
        missing = ranges_of(set(range(ref.chunks)) - self._blobs[ref.digest].keys())
        self._asked = time.monotonic()
        self.reply(NeedChunks(**self.head(self._current), digest=ref.digest, ranges=missing))

    def _chunk(self, digest: str, frame: bytes) -> None:
        ref = self._refs.get(digest)
        if ref is None:
            return
        self.chunks_received += 1
        self._asked = time.monotonic()
        chunk = decode_chunk(frame)
        self._blobs[digest][chunk.index] = bytes(chunk.payload)
        if len(self._blobs[digest]) == ref.chunks:
            data = b"".join(self._blobs[digest][index] for index in range(ref.chunks))
            assert matches(data, digest)
            self._ready[digest] = data
            del self._refs[digest]
            self.link.unsubscribe(self.topics.blob_filter(digest))
            self._go_on()

    def _go_on(self) -> None:
        if self._current is None or self._started:
            return
        choice = self._current.choices[0]
        if choice.artifact_set.digest in self._ready and choice.weights.digest in self._ready:
            self._started = True
            manifest = parse_manifest(self._ready[choice.artifact_set.digest])
            weights = tensors_in(self._ready[choice.weights.digest])
            self.reply(Progress(**self.head(self._current), epoch=1, epochs=1, step=1, loss=0.5))
            self.script(self, Work(self._current, manifest, weights))

    def _repeat(self) -> None:
        now = time.monotonic()
        if self._refs and now - self._asked > RETRY_SECONDS:
            for ref in list(self._refs.values()):
                self._ask(ref)
        if self._update is not None and now - self._announced > RETRY_SECONDS:
            self.reply(self._update[3])

    # What scripts use.

    def head(self, offer: Offer, **changes: Any) -> dict[str, Any]:
        values = {
            "fleet": self.topics.fleet,
            "run": offer.run,
            "round": offer.round,
            "task": offer.task,
        }
        return {**values, "device": self.device, **changes}

    def reply(self, message: Any) -> None:
        self._announced = time.monotonic()
        with contextlib.suppress(TransportError):
            self.link.publish(self.topics.reply(self.device), message.to_bytes())

    def upload(self, task: str, data: bytes, ranges: Any = None) -> None:
        ref = blob_ref(data, self.cut)
        for index, frame in iter_chunks(data, self.cut, ranges or ((0, ref.chunks),)):
            self.link.publish(self.topics.upload(task, index), frame)

    def done(self, work: Work, data: bytes, **changes: Any) -> Done:
        metrics = {
            "examples": changes.pop("examples", 10),
            "batches": changes.pop("batches", 2),
            "labels": changes.pop("labels", (0, 1, 2, 3)),
            "train_loss": 0.5,
            "fetch_seconds": 0.0,
            "train_seconds": 0.0,
            "resident_bytes": 0,
        }
        self.cut = work.offer.choices[0].weights.chunk_bytes
        values = {"update": blob_ref(data, self.cut), "tier": work.offer.choices[0].tier}
        head = self.head(work.offer)
        return Done(**{**head, **values, "metrics": TaskMetrics(**metrics), **changes})

    def send(self, work: Work, data: bytes, **changes: Any) -> None:
        """Upload an update and announce it, until the server has answered."""
        self.sent_updates += 1
        message = self.done(work, data, **changes)
        self._update = (work, data, message.update, message)
        self.upload(work.offer.task, data)
        self.reply(message)

    def refuse(self, work: Work, reason: Any, detail: str = "scripted") -> None:
        self.reply(Refuse(**self.head(work.offer), reason=reason, detail=detail))
        self._current = None


def indices(ranges: Any, count: int) -> set[int]:
    return indices_of(ranges, count)
