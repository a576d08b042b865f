"""Reassembles updates from their chunks, in the server's process as in its receivers.

A device sends the chunks of an update and announces the update. Chunks may arrive in any order, and
after the announcement: brokers keep the order only within one topic. `Reassembly` decides what
happens with each chunk:

- A new chunk is kept, in memory or on disk, even before its update is announced.
- A chunk is dropped if it arrives twice, or after its update is complete: a device whose
  acknowledgement was lost sends everything again.
- A damaged chunk is refused. It then counts as missing, like a chunk that was lost in transit.
- If no chunk of an announced update has arrived for `QUIET_SECONDS`, its missing chunks are
  returned once, so that the device is asked for them. The device announces the update again after
  sending them.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

from broker_server.rounds.collecting import OpenTask
from broker_server.service.partial_uploads import PartialUploads
from broker_server.updates.values import StoredUpdate
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.messages import BlobRef, Ranges

QUIET_SECONDS = 0.3  # without a chunk, after which missing ones are requested


def require_owner(task: OpenTask, signer: str | None) -> None:
    """Refuse a chunk that a device other than the owner of its task has signed.

    Args:
        task: the chunk's task.
        signer: the device that signed the chunk; None in a fleet without identities.

    Raises:
        RefusedError: another device signed it.
    """
    owner = task.record.device
    if signer not in {None, owner}:
        raise RefusedError(RefusalReason.FORGED, f"{signer} sent chunks of the update of {owner}")


@dataclass
class _Announcement:
    """An announced update with missing chunks.

    `quiet_at` is the ``time.monotonic()`` at which they count as lost if no chunk has arrived.
    """

    task: OpenTask
    update: BlobRef
    quiet_at: float


@dataclass(frozen=True)
class MissingChunks:
    """The chunks of an announced update that are to be requested."""

    task: OpenTask
    update: BlobRef
    ranges: Ranges


class Reassembly:
    """The updates that are arriving.

    Args:
        partial: holds the chunks.
    """

    def __init__(self, partial: PartialUploads) -> None:
        self.partial = partial
        self._announced: dict[str, _Announcement] = {}  # by task
        self._complete: set[str] = set()  # tasks whose further chunks are ignored

    def add_chunk(self, task: OpenTask, frame: bytes) -> BlobRef | None:
        """Add a chunk of an open task.

        Args:
            task: the chunk's task.
            frame: the chunk as received.

        Returns:
            The announced update that is complete with this chunk, or None.

        Raises:
            RefusedError: the chunk is damaged, too large, or has a different chunk size from
                earlier chunks.
            StorageError: the disk is full.
        """
        name = task.record.id
        if name in self._complete or task.record.phase.answered:
            return None
        self.partial.add(name, frame, task.limit_bytes)
        announcement = self._announced.get(name)
        if announcement is None:
            return None
        announcement.quiet_at = time.monotonic() + QUIET_SECONDS
        if self.partial.missing(name, announcement.update):
            return None
        return announcement.update

    def announce(self, task: OpenTask, update: BlobRef) -> bool:
        """Record the update that a device has announced; return whether all of its chunks are here.

        An update that was complete before, but is announced again, is received again.
        """
        name = task.record.id
        self._complete.discard(name)
        if not self.partial.missing(name, update):
            self._announced.pop(name, None)
            return True
        self._announced[name] = _Announcement(task, update, time.monotonic() + QUIET_SECONDS)
        return False

    def next_due(self) -> float:
        """Return the ``time.monotonic()`` at which missing chunks are due next, or infinity."""
        due = math.inf
        for announcement in self._announced.values():
            due = min(due, announcement.quiet_at)
        return due

    def pop_overdue(self, now: float) -> list[MissingChunks]:
        """Return what is missing of the announced updates that have been quiet for a while.

        Their announcements are forgotten: their devices announce them again after the chunks.
        """
        missing: list[MissingChunks] = []
        for name, announcement in list(self._announced.items()):
            if announcement.quiet_at > now:
                continue
            del self._announced[name]
            ranges = self.partial.missing(name, announcement.update)
            missing.append(MissingChunks(announcement.task, announcement.update, ranges))
        return missing

    def verify(self, task: OpenTask, update: BlobRef) -> bytes:
        """Return the bytes of a complete update, which the caller then stores or refuses.

        Raises:
            BlobError: the digest of the whole does not match; all of it is dropped.
        """
        self._announced.pop(task.record.id, None)
        return self.partial.finish(task.record.id, update)

    def store(self, task: OpenTask, update: BlobRef, data: bytes) -> StoredUpdate:
        """Check, decode and store a verified update; further chunks of it are ignored.

        Raises:
            BlobError: the weights that were sent to its device are damaged on disk.
            RefusedError: it does not match the request.
        """
        stored = self.partial.check_and_store(task, update, data)
        self._complete.add(task.record.id)
        return stored

    def refuse(self, task: OpenTask) -> None:
        """Drop what has arrived of a refused update, and ignore further chunks of it."""
        name = task.record.id
        self.partial.drop(name)
        self._announced.pop(name, None)
        self._complete.add(name)

    def forget(self, task: str) -> None:
        """Drop everything about a task that is over."""
        self.partial.drop(task)
        self._announced.pop(task, None)
        self._complete.discard(task)

    def keep_only(self, tasks: Mapping[str, OpenTask]) -> None:
        """Forget the announcements of all tasks except these, by id; chunks on disk stay."""
        for name, announcement in list(self._announced.items()):
            # A task that continues in a later collection has another value there.
            if tasks.get(name) is not announcement.task:
                del self._announced[name]
        self._complete.intersection_update(tasks)
