"""The server's side of the protocol for tests: a real MQTT peer that does what its script says, and
remembers.
"""

import contextlib
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fleet_protocol.blob_store import BlobStore
from fleet_protocol.blobs import decode_chunk, iter_chunks, ranges_of
from fleet_protocol.link import Link
from fleet_protocol.messages import (
    Accept,
    Cancel,
    DeviceProfile,
    DeviceStatus,
    Done,
    NeedChunks,
    Offer,
    Profile,
    Progress,
    Ranges,
    Refuse,
    TierChoice,
    TrainSettings,
    UploadAck,
    UploadMissing,
    parse_device_message,
    parse_presence,
)
from fleet_protocol.messages.bounds import CHUNKS_LIMIT
from fleet_protocol.topics import Topics, UploadTopic
from fleet_protocol.transport import BrokerAddress, Received

FLEET = "lab"
RUN = "run1"
Message = TypeVar("Message")
WAIT_SECONDS = 300.0


@dataclass
class Script:
    """What the server does; tests change it while it runs.

    Attributes:
        serve: answer requests for chunks.
        acknowledge: acknowledge complete updates.
        tamper: changes a chunk's frame before it is sent, or withholds it with None.
        lose_upload: chunk indices to overlook once.
    """

    serve: bool = True
    acknowledge: bool = True
    tamper: Callable[[str, int, bytes], bytes | None] = field(
        default=lambda _digest, _index, frame: frame
    )
    lose_upload: set[int] = field(default_factory=set)


class ScriptedServer:
    """Serves blobs, collects updates, and keeps every message of every device.

    Args:
        url: of the broker.
        blobs: what it serves.
    """

    def __init__(self, url: str, blobs: BlobStore) -> None:
        self.script = Script()
        self.blobs = blobs
        self.messages: list[Any] = []
        self.offers: dict[str, Offer] = {}
        self.statuses: list[DeviceStatus] = []
        self.profiles: list[Profile] = []
        self.chunks: dict[str, dict[int, bytes]] = {}
        self.updates: dict[str, bytes] = {}
        self.chunk_bytes = 1024
        self._topics = Topics(FLEET)
        self._sizes: dict[str, tuple[int, int]] = {}
        self._changed = threading.Condition()
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # An address of memory is used again, and the broker keeps a session for its name: the next
        # test's server would be given what devices said to the last one's.
        self._link = Link(BrokerAddress.parse(url), f"server-{uuid.uuid4().hex}", self._inbox)
        self._thread = threading.Thread(target=self._loop, name="scripted-server", daemon=True)

    def start(self) -> None:
        self._link.connect(20)
        for topic in (
            self._topics.status("+"),
            self._topics.profile("+"),
            self._topics.reply("+"),
            self._topics.upload("+", "+"),
        ):
            self._link.subscribe(topic)
        self._thread.start()

    def stop(self) -> None:
        self._inbox.put(None)
        self._thread.join(10)
        self._link.close()

    # What it hears.

    def _loop(self) -> None:
        while (event := self._inbox.get(timeout=600)) is not None:
            if isinstance(event, Received):
                with self._changed:
                    self._on_received(event)
                    self._changed.notify_all()

    def _on_received(self, event: Received) -> None:
        if not event.payload:
            return  # of `shoal device doctor`, which checks what the broker allows
        topic = self._topics.parse(event.topic)
        if isinstance(topic, UploadTopic):
            chunk = decode_chunk(event.payload)
            if chunk.index in self.script.lose_upload:
                self.script.lose_upload.discard(chunk.index)
            else:
                self._sizes[topic.task] = (chunk.size, chunk.chunk_bytes)
                self.chunks.setdefault(topic.task, {})[chunk.index] = bytes(chunk.payload)
        elif topic.channel in {"status", "profile"}:
            said = parse_presence(event.payload).completed(device=topic.device)
            if isinstance(said, DeviceProfile):
                self.profiles.append(said.profile)
            else:
                self.statuses.append(said)
        else:
            message = parse_device_message(event.payload).completed(
                device=topic.device, run=RUN, round=1
            )
            self.messages.append(message)
            if isinstance(message, NeedChunks) and self.script.serve:
                self._serve(message.digest, message.ranges)
            elif isinstance(message, Accept) and self.script.serve:
                choice = next(
                    c for c in self.offers[message.task].choices if message.tier in {"", c.tier}
                )
                for name in message.lacks:
                    self._serve(getattr(choice, name).digest, ((0, CHUNKS_LIMIT),))
            elif isinstance(message, Done):
                self._on_done(message)

    def _serve(self, digest: str, ranges: Ranges) -> None:
        for index, frame in iter_chunks(self.blobs.read(digest), self.chunk_bytes, ranges):
            sent = self.script.tamper(digest, index, frame)
            if sent is not None:
                self._link.publish(self._topics.blob(digest, index), sent)

    def _on_done(self, done: Done) -> None:
        have = self.chunks.get(done.task, {})
        missing = ranges_of(set(range(done.update.chunks)) - set(have))
        if missing:
            self.send(done.device, UploadMissing, done, ranges=missing)
        elif self.script.acknowledge:
            self.updates[done.task] = b"".join(have[i] for i in sorted(have))
            self.send(done.device, UploadAck, done)

    # What it says.

    def send(self, device: str, kind: type[Any], about: Any, **fields: Any) -> None:
        """As a server does: without what the topic, or the task, says."""
        message = kind(task=about.task, **fields)
        self._link.publish(self._topics.task(device), message.to_bytes())

    def offer(self, device: str, choice: TierChoice, **changes: Any) -> Offer:
        """Offer a task; any field can be set."""
        settings = {"learning_rate": 0.1, "epochs": 2, "batch_size": 8, "seed": 1} | changes.pop(
            "train", {}
        )
        values = {
            "run": RUN,
            "round": 1,
            "task": "t1",
            "version": 0,
            "choices": (choice,),
            "train": TrainSettings(**settings),
            "seconds_left": 600.0,
        }
        offer = Offer.model_validate(values | changes)
        self.offers[offer.task] = offer
        self._link.publish(self._topics.task(device), offer.to_bytes())
        return offer

    def cancel(self, device: str, offer: Offer) -> None:
        self.send(device, Cancel, offer, reason="the test says so")

    def say(self, device: str, payload: bytes) -> None:
        """Send raw bytes to a device."""
        self._link.publish(self._topics.task(device), payload)

    def push_chunks(self, digest: str, ranges: Ranges) -> None:
        """Publish chunks that nobody asked for just now."""
        self._serve(digest, ranges)

    # What tests wait for.

    def wait(
        self, condition: Callable[[], bool], seconds: float = WAIT_SECONDS, what: str = ""
    ) -> None:
        with self._changed:
            if not self._changed.wait_for(condition, seconds):
                heard = [type(m).__name__ for m in self.messages][-12:]
                states = [s.state for s in self.statuses][-12:]
                raise TimeoutError(
                    f"waited {seconds} s for {what or condition}; heard {heard}, states {states}"
                )

    def heard(self, kind: type[Message], task: str | None = None) -> list[Message]:
        return [
            m for m in self.messages if isinstance(m, kind) and (task is None or m.task == task)
        ]

    def wait_message(self, kind: type[Message], task: str | None = None, count: int = 1) -> Message:
        """The ``count``-th message of a kind."""
        self.wait(lambda: len(self.heard(kind, task)) >= count, what=f"{kind.__name__} of {task}")
        return self.heard(kind, task)[count - 1]

    def wait_state(self, state: str, device: str = "pi-1", after: int = 0) -> None:
        """A status of the device with this state, among those after the first ``after``."""
        self.wait(
            lambda: any(
                s.device == device and s.state == state and s.online for s in self.statuses[after:]
            ),
            what=f"state {state}",
        )

    def wait_update(self, task: str) -> bytes:
        self.wait(lambda: task in self.updates, what=f"the update of {task}")
        return self.updates[task]

    def summary(self) -> list[str]:
        """Names of the messages so far, requests and progress left out."""
        return [type(m).__name__ for m in self.messages if not isinstance(m, NeedChunks | Progress)]


@contextlib.contextmanager
def scripted_server(url: str, blobs: BlobStore) -> Iterator[ScriptedServer]:
    """A running server."""
    server = ScriptedServer(url, blobs)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def expect_only(server: ScriptedServer, kinds: tuple[type[Any], ...], seconds: float) -> None:
    """Nothing but these kinds of messages arrives for a while."""
    start = len(server.messages)
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(TimeoutError):
            server.wait(
                lambda: any(not isinstance(m, kinds) for m in server.messages[start:]), left
            )
            raise AssertionError(f"unexpected {server.messages[-1]}")


__all__ = [
    "FLEET",
    "Accept",
    "Refuse",
    "Script",
    "ScriptedServer",
    "expect_only",
    "scripted_server",
]
