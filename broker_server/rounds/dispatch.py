"""The services that a coordinator works with, first of all the dispatcher, which asks the devices.

The dispatcher is `broker_server.service.dispatcher.MqttDispatcher` in a fleet and a virtual one in
a simulation.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from broker_server.rounds.accounting import ByteCount
from broker_server.rounds.closing import Decision, decide
from broker_server.rounds.collecting import Cohort, CohortSum, Collection
from broker_server.rounds.fleet import Fleet
from broker_server.rounds.reporting import Reporter
from broker_server.rounds.stopping import OperatorWish
from broker_server.store import Store, TaskPhase
from broker_server.store.machine import RoundEvent
from fleet_protocol.blob_store import BlobStore


class BlobOffers(Protocol):
    """Offers blobs to devices."""

    def serve(self, files: Mapping[str, Path]) -> None:
        """Offer files by digest."""

    def withdraw(self, digests: Iterable[str]) -> None:
        """Stop to offer blobs."""


class Dispatcher(Protocol):
    """Offers tasks to devices and waits for their answers."""

    @property
    def fleet(self) -> Fleet:
        """Return the devices with their presence."""

    @property
    def blobs(self) -> BlobOffers:
        """Return what offers blobs to the devices."""

    @property
    def reporter(self) -> Reporter:
        """Return what reports the run."""

    @property
    def operator(self) -> OperatorWish:
        """Return what the operator of the run wants."""

    @property
    def stopping(self) -> bool:
        """Return whether the run should stop here and resume later."""

    @property
    def settling_seconds(self) -> float:
        """Return how long after the start it may take to learn which devices are online."""

    def now(self) -> float:
        """Return the time on the clock of the rounds, in seconds: of this machine, or simulated."""

    def open(self, collection: Collection) -> None:
        """Begin to collect.

        Answers change the records of the collection's tasks, which the store already holds.
        """

    def close(self, reason: str, *, waits: bool = False) -> None:
        """End the collection.

        Args:
            reason: told to the devices that still work on it.
            waits: they continue instead, and answer in a later collection.
        """

    @property
    def has_begun_sums(self) -> bool:
        """Return whether the opening of a secure sum of the open collection has begun."""

    def sum_obstacle(self, cohort: Cohort) -> str:
        """Return why the sum of a cohort cannot be opened; nothing where it can."""

    def total(self, cohort: Cohort) -> CohortSum:
        """Return the sum of the updates of a cohort of the open collection, without seeing any.

        Raises:
            RefusedError: there are too few, or the masks cannot be removed.
            StopRequested: the run shall stop here and be continued later.
        """

    def forget(self, task: str) -> None:
        """Drop what arrived of the update of a task that is over."""

    def count_bytes(self) -> ByteCount:
        """Return the bytes that were exchanged since the last call, at first since the start."""

    def pump(self, until: float) -> None:
        """Handle one event, or what is due, and return.

        Args:
            until: the longest time to wait for one, on the clock of `now`.

        Raises:
            StopRequested: the run shall stop here and be continued later.
        """


@dataclass(frozen=True)
class Services:
    """The services that a coordinator works with."""

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
    """Collect answers until the collection is over, and return what ended it.

    Args:
        dispatcher: with the collection open.
        collection: of the tasks.
        advance: called with the phases of all tasks, by id, at every change.

    Raises:
        StopRequested: the run shall stop here and be continued later.
    """
    while True:
        now = dispatcher.now()
        progress = collection.note_progress(now, dispatcher.fleet.is_online)
        # Updates are folded while others are awaited, so that little is left to do at the end.
        advance(collection.phases())
        decision = decide(progress, collection.rule, now)
        if dispatcher.operator.abandon_reason:
            return Decision(RoundEvent.GIVE_UP, now, dispatcher.operator.abandon_reason)
        if decision.event is not None:
            return decision
        dispatcher.pump(decision.until)
