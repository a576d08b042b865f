"""A process that takes updates for its server: chunks of its own tasks, put together, checked, and
put on the disk.

It has a connection of its own, hears nothing but the chunks of the tasks that it was given, and
says nothing on it. What it found it tells its server, which alone writes the store, acknowledges
and decides. Nothing is told before it would survive a power cut, so a receiver may die at any
moment: what it had not told is asked for again.

Run as a module: ``python -m broker_server.service.receiver`` reads orders, a line of JSON each,
from its standard input until that closes, and writes reports to its standard output.
"""

import contextlib
import logging
import math
import os
import queue
import secrets
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from broker_server.rounds.collecting import OpenTask
from broker_server.service.inbox import Inbox
from broker_server.service.membership import broker_address, member_of
from broker_server.service.partial_uploads import QUIET_SECONDS, PartialUploads
from broker_server.settings.fleet import BrokerConfig
from broker_server.store import TaskRecord
from broker_server.updates.values import Distance
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.errors import (
    BlobError,
    RefusalReason,
    RefusedError,
    ShoalError,
    StorageError,
)
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.manifest import Manifest
from fleet_protocol.messages import BlobRef, Instructions, Ranges
from fleet_protocol.topics import Topics, UploadTopic
from fleet_protocol.transport import Received, Rejected, open_transport

_LOG = logging.getLogger(__name__)
_REST_SECONDS = 0.02  # in which more comes: to wake up for every chunk takes more of the processor
_TURN_SECONDS = (
    0.2  # longest time that chunks are taken before what they ask for is synced and told
)
BEAT_SECONDS = 1.0  # longest time without a report
# longest time without a line of the server, after which that is gone though the pipe is open
ORDERS_SECONDS = 20


class Begin(FrozenModel):
    """The first order: where to listen, and where to put what comes."""

    fleet: str
    store: Path
    broker: BrokerConfig


class Given(FrozenModel):
    """A task; `asked` is the place of its instructions in its `Open`."""

    record: TaskRecord
    asked: int


class Open(FrozenModel):
    """All tasks that this receiver has from now on."""

    kind: Literal["open"] = "open"
    tasks: tuple[Given, ...]
    asked: tuple[Instructions, ...]
    manifests: dict[str, Manifest]


class Announced(FrozenModel):
    """A device has said that its update is complete."""

    kind: Literal["announced"] = "announced"
    task: str
    tier: str
    update: BlobRef


Order = Annotated[Open | Announced, Field(discriminator="kind")]
_ORDERS: TypeAdapter[Order] = TypeAdapter(Order)


class Word(FrozenModel):
    """What became of an update, or of a chunk that is refused and counted."""

    # ``taken`` is on the disk, ``missing`` has chunks that did not come, the whole that is
    # ``damaged`` has another digest; a chunk is ``counted``
    kind: Literal["taken", "missing", "damaged", "refused", "counted"]
    task: str | None  # whose; None for one of nobody's
    update: str = ""  # digest that was announced
    merged: str = ""  # digest of what is to be merged
    distance: Distance | None = None  # of it to what was sent
    ranges: Ranges = ()  # of what is missing
    reason: RefusalReason = RefusalReason.FAILED  # of a refusal
    text: str = ""  # of it


class Report(FrozenModel):
    """What a receiver tells now and then."""

    words: tuple[Word, ...] = ()  # in order
    heard: tuple[str, ...] = ()  # tasks of which chunks came
    sent: int = 0  # bytes on its connection so far
    received: int = 0  # the same
    cpu_seconds: float = 0.0  # processor time so far
    failed: str = ""  # why it ends, where the disk cannot be written


class Receiver:
    """The updates of some tasks, put where `partial` says.

    `words` and `heard` are what is to be told.
    """

    def __init__(self, partial: PartialUploads) -> None:
        self.partial = partial
        self.words: list[Word] = []
        self.heard: set[str] = set()
        self._tasks: dict[str, OpenTask] = {}
        self._announced: dict[str, BlobRef] = {}
        self._over: dict[str, Word] = {}  # what became of updates, by task

    def open(self, order: Open) -> tuple[set[str], set[str]]:
        """Have other tasks; those that come, and those that go."""
        self.partial.sent.cache_clear()
        before = self._tasks
        self._tasks = {}
        for given in order.tasks:
            record = given.record
            manifests = {choice.tier: order.manifests[choice.tier] for choice in record.choices}
            asked = order.asked[given.asked]
            fresh = OpenTask(
                record, manifests[record.tier], manifests=manifests, instructions=asked
            )
            self._tasks[record.id] = before.get(record.id, fresh)
        gone = before.keys() - self._tasks.keys()
        for task in gone:
            self.partial.drop(task)
            self._announced.pop(task, None)
            self._over.pop(task, None)
        return self._tasks.keys() - before.keys(), set(gone)

    def chunk(self, name: str, event: Received) -> None:
        """Keep a chunk; a StorageError where the disk is full."""
        task = self._tasks.get(name)
        if task is None or name in self._over:
            return
        owner = task.record.device
        if event.signer not in {None, owner}:
            text = f"{event.signer} sent chunks of the update of {owner}"
            self.count(None, RefusedError(RefusalReason.FORGED, text))
            return
        self.heard.add(name)
        try:
            self.partial.add(name, event.payload, task.limit_bytes)
        except RefusedError as error:
            self.count(name, error)
            return
        if (update := self._announced.get(name)) is not None:
            task.quiet = time.monotonic() + QUIET_SECONDS
            if not self.partial.missing(name, update):
                self._take(task, update)

    def announced(self, order: Announced) -> None:
        """Take an update as soon as it is complete; a StorageError where the disk is full."""
        task = self._tasks.get(order.task)
        if task is None:
            return
        if order.task in self._over:
            told = self._over.pop(order.task)
            if told.update == order.update.digest:
                self._tell(told)  # once more: the server had not read it
                return
        task.take(order.tier)
        if self.partial.missing(order.task, order.update):
            # Brokers keep the order of one topic only: the announcement may overtake the chunks.
            self._announced[order.task], task.quiet = (
                order.update,
                time.monotonic() + QUIET_SECONDS,
            )
        else:
            self._take(task, order.update)

    def ask(self, now: float) -> float:
        """Tell which chunks have not come although the line is quiet; when that is due next."""
        for name in [name for name in self._announced if self._tasks[name].quiet <= now]:
            update = self._announced.pop(name)
            missing = self.partial.missing(name, update)
            self.words.append(Word(kind="missing", task=name, update=update.digest, ranges=missing))
        return min((self._tasks[name].quiet for name in self._announced), default=math.inf)

    def count(self, task: str | None, error: RefusedError) -> None:
        """Tell of a chunk that is refused."""
        self.words.append(Word(kind="counted", task=task, reason=error.reason, text=str(error)))

    def _take(self, task: OpenTask, update: BlobRef) -> None:
        name = task.record.id
        word = Word(kind="damaged", task=task.record.id, update=update.digest)
        self._announced.pop(name, None)
        try:
            data = self.partial.finish(name, update)
        except BlobError as error:
            self.words.append(word.model_copy(update={"text": str(error)}))
            return
        try:
            stored = self.partial.take(task, update, data)
            word = word.model_copy(
                update={"kind": "taken", "merged": stored.digest, "distance": stored.distance}
            )
        except RefusedError as error:
            self.partial.drop(name)
            word = word.model_copy(
                update={"kind": "refused", "reason": error.reason, "text": str(error)}
            )
        self._tell(word)

    def _tell(self, word: Word) -> None:
        self._over[str(word.task)] = word
        self.words.append(word)

    def told(self) -> tuple[tuple[Word, ...], tuple[str, ...]]:
        """What is to be told, once it would survive a power cut.

        A StorageError where the disk is full.
        """
        words = tuple(self.words)
        heard = tuple(self.heard)
        self.words.clear()
        self.heard.clear()
        self.partial.blobs.sync({word.merged for word in words if word.kind == "taken"})
        return words, heard


class _Desk:
    """A receiver at work: what comes from its broker and its server is handled, what it found is
    told.
    """

    def __init__(self, begin: Begin, inbox: Inbox) -> None:
        self._inbox = inbox
        self._rest = threading.Event()
        self._topics = Topics(begin.fleet)
        updates, blobs = (BlobStore(begin.store / name) for name in ("updates", "blobs"))
        self._receiver = Receiver(PartialUploads(updates, blobs))
        self._link = open_transport(
            broker_address(begin.broker),
            f"shoal-{begin.fleet}-receiver-{secrets.token_hex(4)}",
            inbox,
            session_expiry_seconds=0,  # what is lost with the connection is asked for again
            member=member_of(begin.broker),
        )
        self._link.connect(begin.broker.connect_timeout_seconds)

    def work(self) -> None:
        """Work until the process ends; a StorageError where the disk is full."""
        beat = -math.inf
        while True:
            now = time.monotonic()
            due = self._receiver.ask(now)
            if self._receiver.words or now >= beat:
                words, heard = self._receiver.told()
                self._say(Report(words=words, heard=heard))
                beat = now + BEAT_SECONDS
            with contextlib.suppress(queue.Empty):
                self._handle(self._inbox.get(timeout=max(0.0, min(due, beat) - time.monotonic())))
                self._rest.wait(_REST_SECONDS)
                while time.monotonic() < now + _TURN_SECONDS:
                    self._handle(self._inbox.get_nowait())

    def fail(self, error: StorageError) -> None:
        """Tell why it ends."""
        self._say(Report(failed=str(error)))

    def _say(self, report: Report) -> None:
        wire = self._link.wire
        now = {
            "sent": wire.sent,
            "received": wire.received,
            "cpu_seconds": time.process_time(),
        }
        report = report.model_copy(update=now)
        sys.stdout.buffer.write(report.to_bytes() + b"\n")
        sys.stdout.buffer.flush()

    def _handle(self, event: object) -> None:
        try:
            self._obey(event)
        except StorageError:
            raise
        except Exception as error:  # noqa: BLE001  (as in the server: one message must not end it)
            _LOG.exception("a receiver could not handle what came")
            self._receiver.count(
                None,
                RefusedError(RefusalReason.FAILED, f"{type(error).__name__}: {error}"),
            )

    def _obey(self, event: object) -> None:
        match event:
            case Received() if isinstance(topic := self._topics.parse(event.topic), UploadTopic):
                self._receiver.chunk(topic.task, event)
            case Rejected():
                self._receiver.count(None, event.error)
            case Announced():
                self._receiver.announced(event)
            case Open():
                come, gone = self._receiver.open(event)
                for task in gone:
                    self._link.unsubscribe(self._topics.upload(task, "+"))
                for task in come:
                    self._link.subscribe(self._topics.upload(task, "+"), timeout_seconds=0)


def _main() -> None:
    begin = Begin.model_validate_json(sys.stdin.buffer.readline())
    inbox = Inbox()

    def obey() -> None:
        signal.alarm(ORDERS_SECONDS)
        for line in sys.stdin.buffer:
            signal.alarm(ORDERS_SECONDS)
            if line.strip():
                inbox.put(_ORDERS.validate_json(line))
        os._exit(0)  # our server has closed the pipe, or has died

    threading.Thread(target=obey, name="orders", daemon=True).start()
    desk = None
    try:
        desk = _Desk(begin, inbox)
        desk.work()
    except ShoalError as error:
        if isinstance(error, StorageError) and desk is not None:
            desk.fail(error)
        sys.stderr.write(f"a receiver of updates ends: {error}\n")
    os._exit(1)


if __name__ == "__main__":
    _main()
