"""What the states of the agent share: the task in hand, the folder, the link, and the words to the server."""

from __future__ import annotations

import errno
import math
import queue
import re
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from device_runtime.board import Board, runtime_version
from device_runtime.cache import Cache
from device_runtime.compute import Bench
from device_runtime.config import DeviceConfig
from device_runtime.journal import Journal
from device_runtime.machine import Event, State
from device_runtime.sizing import SizingStore, after_round, choose_width
from device_runtime.task_store import TaskRecord, TaskStore
from device_runtime.work import Worker
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.errors import (
    BlobError,
    ConfigError,
    DataError,
    RefusalReason,
    RefusedError,
    StorageError,
    TransportError,
)
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.link import Link
from fleet_protocol.manifest import Manifest
from fleet_protocol.messages import DeviceStatus, Offer, Profile, TierChoice
from fleet_protocol.topics import Topics

__all__ = ["Context", "Task", "refusal_of"]

_TIER = re.compile(r"^w(\d+\.\d+)-d(\d+)$")
_OUTCOMES_KEPT = 32
_UNWANTED_KEPT = 256


def _width(tier: str) -> float:
    match = _TIER.fullmatch(tier)
    return float(match[1]) if match else math.inf


@dataclass
class Task:
    """The task in hand.

    Attributes:
        record: what is, or will be, on disk about it.
        deadline: ``time.monotonic()`` when its round closes.
        started: ``time.monotonic()`` of the offer, or of the restart.
        resumed: it was found on disk.
        manifest: of the artifact set taken, once fetched.
        fetch_seconds: from the offer to the blobs on disk.
    """

    record: TaskRecord
    deadline: float
    started: float
    resumed: bool = False
    manifest: Manifest | None = None
    fetch_seconds: float = 0.0

    @property
    def offer(self) -> Offer:
        """What the server wants."""
        return self.record.offer

    def blobs_in_use(self) -> set[str]:
        """Digests that must stay on disk while the task lasts."""
        choice, update = self.record.choice, self.record.update
        graphs = {spec.digest for spec in self.manifest.graphs.values()} if self.manifest else set()
        return {choice.artifact_set.digest, choice.weights.digest, *graphs, *([update.digest] if update else [])}


def refusal_of(error: Exception) -> tuple[RefusalReason, str]:
    """What to tell the server about a failure.

    Args:
        error: anything a task raised.

    Returns:
        The reason, and a text for the operator.
    """
    if isinstance(error, RefusedError):
        return error.reason, str(error)
    if isinstance(error, StorageError):
        cause = error.__cause__
        full = isinstance(cause, OSError) and cause.errno in {errno.ENOSPC, errno.EDQUOT}
        return (RefusalReason.NO_SPACE if full else RefusalReason.FAILED), str(error)
    if isinstance(error, DataError):
        return RefusalReason.NO_DATA, str(error)
    if isinstance(error, BlobError):
        return RefusalReason.MALFORMED, str(error)
    if isinstance(error, ConfigError):
        return RefusalReason.UNSUPPORTED, str(error)
    return RefusalReason.FAILED, f"{type(error).__name__}: {error}"


@dataclass
class Context:
    """The agent's state beside the state of its machine.

    Attributes:
        config: the operator's.
        inbox: everything that happens.
        journal: the log.
        blobs: content-addressed files.
        store: the task record.
        cache: what the blobs are for.
        worker: the thread for long work.
        state: of the machine; written by the agent's loop alone.
        bench: data and backend, from probing on.
        board: from probing on.
        link: from probing on.
        task: in hand, from the offer to its end.
        pending: an offer that waits until the task in hand is dropped.
        failure: why the task is about to be refused.
        events: posted and not yet handled.
        outcomes: how recent tasks ended.
        unwanted: blobs whose subscription was given back because chunks came that nobody waits for.
    """

    config: DeviceConfig
    inbox: queue.SimpleQueue[Any]
    journal: Journal
    blobs: BlobStore
    store: TaskStore
    cache: Cache
    worker: Worker
    state: State = State.STARTING
    bench: Bench | None = None
    board: Board | None = None
    link: Link | None = None
    task: Task | None = None
    pending: Offer | None = None
    failure: tuple[RefusalReason, str] | None = None
    step_seconds: float | None = None
    link_bytes_per_second: float | None = None
    events: deque[Event] = field(default_factory=deque)
    outcomes: deque[tuple[str, Event, tuple[RefusalReason, str] | None]] = field(
        default_factory=lambda: deque(maxlen=_OUTCOMES_KEPT)
    )
    unwanted: set[str] = field(default_factory=set)
    _seq: int = 0

    @property
    def topics(self) -> Topics:
        """Topics of the fleet."""
        return Topics(self.config.fleet)

    def post(self, event: Event) -> None:
        """Tell the loop what a state has seen; it is handled before anything else from the inbox."""
        self.events.append(event)

    def fail(self, error: Exception) -> None:
        """Give a task up for a reason that the server will hear."""
        self.failure = refusal_of(error)
        bug = self.failure[0] is RefusalReason.FAILED and not isinstance(error, RefusedError | StorageError)
        self.journal.error(f"failed: {self.failure[1]}", error if bug else None)
        self.post(Event.FAILED)

    def need_task(self) -> Task:
        """The task in hand."""
        if self.task is None:
            raise RuntimeError(f"the device in state {self.state.value!r} has no task; this is a bug")
        return self.task

    def need_bench(self) -> Bench:
        """Data and backend."""
        if self.bench is None:
            raise RuntimeError(f"the device in state {self.state.value!r} has not loaded its data; this is a bug")
        return self.bench

    def need_link(self) -> Link:
        """The connection."""
        if self.link is None:
            raise RuntimeError(f"the device in state {self.state.value!r} has no link; this is a bug")
        return self.link

    def save(self, **changes: object) -> None:
        """Change the task record, on disk first.

        Raises:
            StorageError: the disk is full; memory and disk are as before.
        """
        task = self.need_task()
        record = task.record.model_copy(update=changes)
        self.store.save(record)
        task.record = record

    def next_seq(self) -> int:
        """Number of the next message."""
        self._seq += 1
        return self._seq

    def send(self, kind: type[FrozenModel], **fields: object) -> None:
        """Send a message about the task in hand; while the broker is away it waits.

        Args:
            kind: a device message.
            fields: what it carries beside fleet, device, run, round and task.
        """
        offer = self.need_task().offer
        message = kind.model_validate(
            {
                "fleet": self.config.fleet,
                "seq": self.next_seq(),
                "device": self.config.device,
                "run": offer.run,
                "round": offer.round,
                "task": offer.task,
                **fields,
            }
        )
        try:
            self.need_link().publish(self.topics.reply(self.config.device), message.model_dump_json().encode())
        except TransportError as error:
            self.journal.warning(f"cannot send {kind.__name__}: {error}; it is sent again with the next offer")

    def subscribe_blob(self, digest: str) -> None:
        """Let the chunks of a blob come."""
        self.unwanted.discard(digest)
        try:
            self.need_link().subscribe(self.topics.blob_filter(digest))
        except TransportError as error:
            self.journal.warning(f"{error}; chunks are asked for again")

    def unsubscribe_blob(self, digest: str) -> None:
        """Let no more chunks of a blob come."""
        self.need_link().unsubscribe(self.topics.blob_filter(digest))

    def decline_chunk(self, digest: str) -> None:
        """A chunk came that nobody waits for.

        It is an echo of a subscription just ended, or the broker's session still holds one from before a crash.
        """
        if digest not in self.unwanted and len(self.unwanted) < _UNWANTED_KEPT:
            self.unwanted.add(digest)
            self.unsubscribe_blob(digest)

    def status(self, *, online: bool = True) -> bytes:
        """The retained status.

        Args:
            online: False for the will and the farewell.
        """
        return DeviceStatus(
            fleet=self.config.fleet,
            seq=self.next_seq(),
            device=self.config.device,
            online=online,
            state=self.state.value,
            profile=self._profile() if online else None,
        ).to_bytes()

    def publish_status(self) -> None:
        """Tell the fleet what this device is and does."""
        try:
            self.need_link().publish(self.topics.status(self.config.device), self.status(), retain=True)
        except TransportError as error:
            self.journal.warning(f"cannot send the status: {error}")

    def _profile(self) -> Profile | None:
        board, bench = self.board, self.bench
        if board is None or bench is None:
            return None
        return Profile(
            arch=board.arch,
            system=board.system,
            cores=board.cores,
            ram_bytes=board.ram_bytes,
            free_ram_bytes=board.free_ram_bytes,
            backends=dict(board.backends),
            runtime_version=runtime_version(),
            python=board.python,
            max_width=self.config.max_width,
            max_depth=self.config.max_depth,
            examples=bench.examples,
            step_seconds=self.step_seconds,
            link_bytes_per_second=self.link_bytes_per_second,
            temperature_celsius=board.temperature_celsius,
            on_battery=board.on_battery,
        )

    def choose(self, offer: Offer) -> TierChoice | None:
        """The first sub-model of an offer that this board may train, or the one it wants if it may choose.

        A statistics task measures the global model with one forward pass, so the limits of training do not count.

        Args:
            offer: from the server.
        """
        able = [choice for choice in offer.choices if offer.kind == "statistics" or self._fits(choice.tier)]
        sizing = offer.train.sizing
        if not able or sizing is None or offer.kind == "statistics":
            return able[0] if able else None
        per_pass = math.ceil(self.need_bench().examples / offer.train.batch_size)
        steps = offer.train.steps or offer.train.epochs * per_pass
        width = choose_width(
            SizingStore(self.config.state_dir).load(offer.run, sizing),
            sizing,
            [_width(choice.tier) for choice in able],
            steps=steps,
            bytes_per_second=self.link_bytes_per_second,
        )
        return next(choice for choice in able if _width(choice.tier) == width)

    def remember_round(self, loss: float) -> None:
        """Keep what the next choice of a tier needs to know of this round.

        Args:
            loss: mean over all training steps.
        """
        record = self.need_task().record
        sizing = record.offer.train.sizing
        if sizing is None:
            return
        store = SizingStore(self.config.state_dir)
        before = store.load(record.offer.run, sizing)
        after = after_round(
            before,
            sizing,
            number=record.offer.round,
            width=_width(record.tier),
            step_seconds=self.step_seconds,
            loss=loss,
        )
        store.save(after)
        self.journal.info(f"training efficiency {after.state.training_efficiency:g} for the next choice of a tier")

    def _fits(self, tier: str) -> bool:
        match = _TIER.fullmatch(tier)
        if match is None:
            return False
        deep = self.config.max_depth is not None and int(match[2]) > self.config.max_depth
        return float(match[1]) <= self.config.max_width and not deep

    def take(self, offer: Offer) -> None:
        """Make an offer the task in hand, or prepare its refusal; posts which."""
        now = time.monotonic()
        choice = self.choose(offer)
        record = TaskRecord(
            phase="fetching",
            offer=offer,
            tier=(choice or offer.choices[0]).tier,
            deadline_unix=time.time() + offer.seconds_left,
        )
        self.task = Task(record, deadline=now + offer.seconds_left, started=now)
        self.journal.follow(offer)
        if choice is None:
            offered = ", ".join(c.tier for c in offer.choices)
            limit = f"width {self.config.max_width:g}, depth {self.config.max_depth or 'any'}"
            self.failure = (RefusalReason.UNSUPPORTED, f"offered {offered}; this board is limited to {limit}")
            self.post(Event.UNSUITABLE)
            return
        self.journal.info(f"offer {offer.kind} tier={choice.tier} seconds_left={offer.seconds_left:g}")
        self.post(Event.OFFERED)
