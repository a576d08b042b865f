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
- An announced update whose chunks are all here is verified, checked and stored at once.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from broker_server.rounds.collecting import OpenTask
from broker_server.service.partial_uploads import PartialUploads
from broker_server.stages.update import Distance
from fleet_protocol.errors import BlobError, RefusalReason, RefusedError
from fleet_protocol.frozen import FrozenModel
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


class UploadOutcome(FrozenModel):
    """The outcome of an announced update, or of a chunk.

    Attributes:
        kind: ``stored``: the update is on disk; ``missing``: chunks of it did not arrive;
            ``damaged``: the whole has another digest; ``refused``: it does not match the request;
            ``counted``: no update, but a refused chunk.
        task: id of the task; None for a chunk without one.
        update: the announced digest.
        merged: digest of the decoded update, if it is stored.
        distance: distance of a stored update from the weights that were sent to its device.
        ranges: ranges of the missing chunks.
        reason: reason of a refusal.
        detail: detail of a refusal, or of the damage.
    """

    kind: Literal["stored", "missing", "damaged", "refused", "counted"]
    task: str | None
    update: str = ""
    merged: str = ""
    distance: Distance | None = None
    ranges: Ranges = ()
    reason: RefusalReason = RefusalReason.FAILED
    detail: str = ""


class Reassembly:
    """The updates that are arriving.

    Args:
        partial: holds the chunks.
    """

    def __init__(self, partial: PartialUploads) -> None:
        self.partial = partial
        self._announced: dict[str, _Announcement] = {}  # by task
        self._complete: set[str] = set()  # tasks whose further chunks are ignored

    def add_chunk(self, task: OpenTask, frame: bytes) -> UploadOutcome | None:
        """Add a chunk of an open task.

        Args:
            task: the chunk's task.
            frame: the chunk as received.

        Returns:
            The outcome of the announced update that is complete with this chunk, or the refusal of
            the chunk because it is damaged, too large, or has a different chunk size from earlier
            chunks; None if there is neither.

        Raises:
            BlobError: the weights that were sent to the device are damaged on disk.
            StorageError: the disk is full.
        """
        name = task.record.id
        if name in self._complete or task.record.phase.answered:
            return None
        try:
            self.partial.add(name, frame, task.limit_bytes)
        except RefusedError as error:
            return UploadOutcome(kind="counted", task=name, reason=error.reason, detail=str(error))
        announcement = self._announced.get(name)
        if announcement is None:
            return None
        announcement.quiet_at = time.monotonic() + QUIET_SECONDS
        if self.partial.missing(name, announcement.update):
            return None
        return self._receive(task, announcement.update)

    def announce(self, task: OpenTask, update: BlobRef) -> UploadOutcome | None:
        """Receive the update that a device has announced, or await its missing chunks.

        An update that was complete before, but is announced again, is received again.

        Returns:
            The outcome of the update; None while chunks of it are missing.

        Raises:
            BlobError: the weights that were sent to the device are damaged on disk.
            StorageError: the disk is full.
        """
        name = task.record.id
        self._complete.discard(name)
        if self.partial.missing(name, update):
            self._announced[name] = _Announcement(task, update, time.monotonic() + QUIET_SECONDS)
            return None
        return self._receive(task, update)

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

    def _receive(self, task: OpenTask, update: BlobRef) -> UploadOutcome:
        """Verify, check and store an update whose chunks are all here."""
        name = task.record.id
        self._announced.pop(name, None)
        try:
            data = self.partial.finish(name, update)
        except BlobError as error:
            # Its chunks are dropped and count again: the device sends all of them again.
            return UploadOutcome(kind="damaged", task=name, update=update.digest, detail=str(error))
        try:
            stored = self.partial.check_and_store(task, update, data)
        except RefusedError as error:
            self.refuse(task)
            return UploadOutcome(
                kind="refused",
                task=name,
                update=update.digest,
                reason=error.reason,
                detail=str(error),
            )
        self._complete.add(name)
        return UploadOutcome(
            kind="stored",
            task=name,
            update=update.digest,
            merged=stored.digest,
            distance=stored.distance,
        )

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
