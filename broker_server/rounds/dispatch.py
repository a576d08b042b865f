"""What a coordinator works with, and what it needs of whoever asks the devices.

The dispatcher is `broker_server.service.dispatcher.MqttDispatcher` in a fleet and a virtual one in
a simulation.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from broker_server.rounds.accounting import ByteCount
from broker_server.rounds.closing import Decision, decide
from broker_server.rounds.collecting import Cohort, Collection
from broker_server.rounds.fleet import Fleet
from broker_server.rounds.reporting import Reporter
from broker_server.rounds.stopping import OperatorWish
from broker_server.store import Store, TaskPhase
from broker_server.store.machine import RoundEvent
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.secure_sum import Words


class BlobOffers(Protocol):
    """Offers blobs to devices."""

    def serve(self, files: Mapping[str, Path]) -> None:
        """Offer files by digest."""

    def withdraw(self, digests: Iterable[str]) -> None:
        """Offer blobs no longer."""


class Dispatcher(Protocol):
    """Puts tasks before devices and waits for their answers."""

    @property
    def fleet(self) -> Fleet:
        """Who is there."""

    @property
    def blobs(self) -> BlobOffers:
        """Offers what the devices fetch."""

    @property
    def reporter(self) -> Reporter:
        """Reports the run."""

    @property
    def operator(self) -> OperatorWish:
        """What the run's operator wants."""

    @property
    def stopping(self) -> bool:
        """Whether the run should stop here and resume later."""

    @property
    def settling_seconds(self) -> float:
        """How long it may take, from its start, to hear who is there."""

    def now(self) -> float:
        """The clock that rounds go by, in seconds: of this machine, or of a simulation."""

    def open(self, collection: Collection) -> None:
        """Begin to collect.

        Answers change the records of the collection's tasks, which the store already holds.
        """

    def close(self, reason: str, *, waits: bool = False) -> None:
        """End the collection.

        Whoever still works on it is told why, or goes on and answers in a later one.
        """

    def total(self, cohort: Cohort) -> Words:
        """The sum of the updates that came of a cohort of the open collection.

        Nobody sees one of them.

        Raises:
            RefusedError: there are too few, or the masks cannot be taken off.
            StopRequested: the run shall stop here and be continued later.
        """

    def forget(self, task: str) -> None:
        """Drop what came of the update of a task that is over."""

    def count_bytes(self) -> ByteCount:
        """Bytes that were exchanged since the last call, at first since the beginning."""

    def pump(self, until: float) -> None:
        """Handle one event, or what is due, and return.

        Wait until a moment on the clock of `now` at most.

        Raises:
            StopRequested: the run shall stop here and be continued later.
        """


@dataclass(frozen=True)
class Services:
    """What a coordinator works with."""

    dispatcher: Dispatcher
    store: Store
    blobs: BlobStore  # global versions, sent weights and statistics
    updates: BlobStore  # what devices sent

    def record_traffic(self, run: str) -> None:
        """Store how many refusals and bytes a run has had since the last call."""
        self.dispatcher.reporter.count()
        count = self.dispatcher.count_bytes()
        self.store.add_bytes(run, wire=count.wire, payload=count.payload)


def gather(
    dispatcher: Dispatcher,
    collection: Collection,
    advance: Callable[[Mapping[str, TaskPhase]], None] = lambda _phases: None,
) -> Decision:
    """Collect until the collection is over, and say what ended it.

    `advance` is told the phases at every change.

    Raises:
        StopRequested: the run shall stop here and be continued later.
    """
    while True:
        now = dispatcher.now()
        standings = collection.note_progress(now, dispatcher.fleet.is_online)
        advance(collection.phases())
        decision = decide(standings, collection.rule, now)
        if dispatcher.operator.abandon_reason:
            return Decision(RoundEvent.GIVE_UP, now, dispatcher.operator.abandon_reason)
        if decision.event is not None:
            return decision
        dispatcher.pump(decision.until)
