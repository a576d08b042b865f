"""Offers tasks to devices, repeats offers to silent devices, and detects silence.

Two times are kept for each task of a device, see `OpenTask`: `heard` is that of the last message
about the task itself, after which an offer is repeated; `sign` is that of the last message of any
kind, after which the device counts as offline.
"""

import math
import time

from broker_server.rounds.collecting import Collection, OpenTask
from broker_server.service.cohorts import REVEAL_SECONDS
from broker_server.service.connection import RunServices
from broker_server.service.outbox import Outbox
from fleet_protocol.messages.presence import ALIVE_SECONDS
from fleet_protocol.transport import BACKOFF_MAX_SECONDS

# a device that reports to be idle has this long to answer an offer in transit
CROSSING_SECONDS = 1.0
# of a working device, after which it counts as offline: a broker takes longer to notice
SILENT_SECONDS = 2.5 * ALIVE_SECONDS
DEAF_SECONDS = 2.0  # without an empty inbox, during which silence does not count


class Offers:
    """The offers of the open collection.

    Args:
        services: services of the run.
        outbox: sends messages to devices.
        nudge_seconds: time without a message about a task, after which it is offered again.
    """

    def __init__(self, services: RunServices, outbox: Outbox, nudge_seconds: float) -> None:
        self._fleet = services.fleet
        self._blobs = services.blobs
        self._reporter = services.reporter
        self._clock = services.clock
        self._outbox = outbox
        self._nudge_seconds = nudge_seconds
        self._collection: Collection | None = None
        self._listened = math.inf  # when the inbox was last empty, by the clock of the run

    @property
    def unanswered(self) -> list[OpenTask]:
        """Return the tasks of the open collection that are not answered yet."""
        return [] if self._collection is None else self._collection.unanswered

    @property
    def round_number(self) -> int | None:
        """Return the number of the round of the open collection, if any."""
        return None if self._collection is None else self._collection.number

    def open(self, collection: Collection) -> None:
        """Offer every task of a collection whose device is online."""
        self._collection = collection
        self.repeat_all()
        self._listened = self._clock.now()

    def close(self) -> Collection | None:
        """Stop offering; return the collection that was open."""
        collection = self._collection
        self._collection = None
        return collection

    def repeat_all(self) -> None:
        """Send every open offer again."""
        for task in self.unanswered:
            self._send(task)

    def repeat_due(self, now: float) -> None:
        """Repeat the offers about which nothing has arrived for a while."""
        for task in self.unanswered:
            if now - max(task.heard, task.offered) >= self._nudge_seconds:
                self._send(task)

    def note_sign(self, device: str) -> None:
        """Record that a device has sent a message."""
        self._fleet.mark_active(device)
        if self._collection is None:
            return
        for task in self._collection.unanswered_of(device):
            task.sign = self._clock.now()

    def note_arrival(self, device: str) -> None:
        """Offer its tasks to a device that has come online."""
        if self._collection is not None:
            for task in self._collection.unanswered_of(device):
                self._send(task)

    def note_idle(self, device: str) -> None:
        """Offer its tasks soon to a device that reports none.

        Either the offer and this message have crossed, or a broker's restart swallowed the offer.
        """
        if self._collection is None:
            return
        due = time.monotonic() - self._nudge_seconds + CROSSING_SECONDS
        for task in self._collection.unanswered_of(device):
            task.offered = min(task.offered, due)
            task.heard = min(task.heard, due)

    def note_reconnection(self) -> None:
        """Give devices time to reconnect after the broker, which they do at their own pace."""
        for task in self.unanswered:
            task.sign = self._clock.now() + BACKOFF_MAX_SECONDS

    def count_silent(self) -> None:
        """Count devices with open tasks as offline if they do not answer even a repeated offer.

        Called when the inbox is empty: messages that the server did not handle because it was busy
        or suspended do not count as silence of the devices.
        """
        now = self._clock.now()
        deaf_seconds = now - self._listened
        # Also if nothing is silent: the next call counts from here.
        self._listened = now
        for task in self.unanswered:
            if deaf_seconds > DEAF_SECONDS:
                task.sign += deaf_seconds
            silence = now - task.sign  # negative infinity before its first offer
            device = task.record.device
            if silence >= SILENT_SECONDS and self._fleet.is_online(device):
                self._fleet.mark_silent(device)
                task.left = task.sign
                why = (
                    f"{device} is connected, but has sent nothing for {silence:.0f} s; the "
                    "round no longer waits for it"
                )
                self._reporter.note("silent", why, self.round_number)
            elif silence >= SILENT_SECONDS / 2 <= time.monotonic() - task.offered:
                self._send(task)

    def _send(self, task: OpenTask) -> None:
        collection = self._collection
        now = self._clock.now()
        device = task.record.device
        if collection is None or not self._fleet.is_online(device) or now >= collection.deadline:
            return
        # Before the first offer of a task: blobs that several devices will soon request are held
        # back, and published once for all of them.
        for ref in (task.record.artifact_set, task.record.weights):
            if task.offered < 0 and not self._blobs.has_asked(ref.digest, device):
                self._blobs.expect(ref.digest, device)
        task.offered = time.monotonic()
        if math.isinf(task.sign):
            task.sign = now
        seconds_left = collection.deadline - now
        if task.instructions.upload.summing is not None:
            # Sums are opened one after the other, and their devices are needed until then.
            seconds_left += REVEAL_SECONDS * len(collection.cohorts())
        self._outbox.offer(task.record, task.instructions, seconds_left)
