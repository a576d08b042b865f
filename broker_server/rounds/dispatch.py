"""The services that a coordinator uses, above all the dispatcher, which sends tasks to devices.

The dispatcher is `broker_server.service.dispatcher.MqttDispatcher` in a fleet and a virtual one in
a simulation.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from broker_server.rounds.accounting import ByteCount
from broker_server.rounds.collecting import Cohort, CohortSum, Collection
from broker_server.rounds.collection_end import Decision, decide
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
        """Stop offering blobs."""


class Dispatcher(Protocol):
    """Offers tasks to devices and waits for their answers."""

    @property
    def fleet(self) -> Fleet:
        """Return the devices with their presence."""

    @property
    def blobs(self) -> BlobOffers:
        """Return the service that offers blobs to the devices."""

    @property
    def reporter(self) -> Reporter:
        """Return the reporter of the run."""

    @property
    def operator(self) -> OperatorWish:
        """Return the wishes of the run's operator."""

    @property
    def stopping(self) -> bool:
        """Return whether the run should stop here and resume later."""

    @property
    def settling_seconds(self) -> float:
        """Return how long after the start it may take to learn which devices are online."""

    def now(self) -> float:
        """Return the time of the rounds' clock in seconds: the machine's, or a simulated one."""

    def open(self, collection: Collection) -> None:
        """Begin to collect.

        Answers change the records of the collection's tasks, which are already in the store.
        """

    def close(self, reason: str, *, waits: bool = False) -> None:
        """End the collection.

        Args:
            reason: sent to the devices that still work on it.
            waits: they continue instead, and answer in a later collection.
        """

    @property
    def has_begun_sums(self) -> bool:
        """Return whether the opening of a secure sum of the open collection has begun."""

    def sum_obstacle(self, cohort: Cohort) -> str:
        """Return why the sum of a cohort cannot be opened; empty if it can."""

    def total(self, cohort: Cohort) -> CohortSum:
        """Return the sum of a cohort's updates in the open collection, without seeing any update.

        Raises:
            RefusedError: there are too few, or the masks cannot be removed.
            StopRequested: the run must stop here and resume later.
        """

    def forget(self, task: str) -> None:
        """Drop the part of a finished task's update that has arrived."""

    def count_bytes(self) -> ByteCount:
        """Return the bytes exchanged since the last call, at first since the start."""

    def pump(self, until: float) -> None:
        """Handle one event, or what is due, and return.

        Args:
            until: when to stop waiting for an event, by the clock of `now`.

        Raises:
            StopRequested: the run must stop here and resume later.
        """


@dataclass(frozen=True)
class RunStorage:
    """Where a run keeps what survives a crash."""

    store: Store
    blobs: BlobStore  # global versions, sent weights and statistics
    updates: BlobStore  # updates of devices


@dataclass(frozen=True)
class Services(RunStorage):
    """The services that a coordinator uses: its storage, and a way to the devices."""

    dispatcher: Dispatcher

    def record_traffic(self, run: str) -> None:
        """Store the numbers of refusals and bytes since the last call."""
        self.dispatcher.reporter.count()
        count = self.dispatcher.count_bytes()
        self.store.add_bytes(run, wire=count.wire, payload=count.payload)


def gather(
    dispatcher: Dispatcher,
    collection: Collection,
    advance: Callable[[Mapping[str, TaskPhase]], None] = lambda _phases: None,
) -> Decision:
    """Collect updates until the collection is over, and return what ended it.

    Args:
        dispatcher: dispatcher with the collection open.
        collection: collection of the tasks.
        advance: called with the phases of all tasks, by id, at every change.

    Raises:
        StopRequested: the run must stop here and resume later.
    """
    while True:
        now = dispatcher.now()
        progress = collection.note_progress(now, dispatcher.fleet.is_online)
        # Updates are folded while others are awaited, so that little work is left at the end.
        advance(collection.phases())
        decision = decide(progress, collection.rule, now)
        if dispatcher.operator.abandon_reason:
            return Decision(RoundEvent.GIVE_UP, now, dispatcher.operator.abandon_reason)
        if decision.event is not None:
            return decision
        dispatcher.pump(decision.until)
