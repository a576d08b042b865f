"""The device's memory across restarts: one record of the task in hand.

It is written before anything is done about the task.

A state saves the record with its own name first and acts second, so after a power cut the record
says what may have been begun. ``resume_event`` is the whole recovery map.
"""

import contextlib
import json
import time
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from device_runtime.agent.machine import Event
from device_runtime.agent.memory import Load
from device_runtime.board import boot_id
from fleet_protocol.blob_store import BlobStore, write_atomically
from fleet_protocol.errors import BlobError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages import BlobRef, Offer, TaskMetrics, TierChoice

CRASH_LIMIT = 3  # a task that took the agent down this often is refused instead of tried again
# So is one in which the board started anew so often: its supply may be too weak to compute.
OUTAGE_LIMIT = 20

Phase = Literal["fetching", "sizing", "training", "measuring", "uploading"]


class StoredTask(FrozenModel):
    """What must survive a power cut.

    Attributes:
        version: of this schema; a record of another version is set aside.
        phase: the state that saved it.
        offer: as it arrived.
        tier: the choice taken.
        chosen: false while it is only measured, for the board to choose by.
        deadline_unix: when the round closes by the board's own clock, seconds since 1970.
        boot: which of the board's starts saved it.
        crashes: how often the agent came back, in one start of the board, without having ended this
            task or itself.
        outages: how often the board itself started anew meanwhile, which says nothing about the
            task.
        settled: the agent ended by itself, so coming back is no crash.
        update: the finished update, from uploading on.
        masked: whether it is covered with the masks of a secure sum, whose keys are in memory
            alone.
        metrics: what goes with it.
        load: what is computed, from sizing, training or measuring on.
    """

    version: Literal[3] = 3
    phase: Phase
    offer: Offer
    tier: str
    chosen: bool = True
    deadline_unix: float
    boot: str = Field(default_factory=boot_id)
    crashes: int = Field(default=0, ge=0)
    outages: int = Field(default=0, ge=0)
    settled: bool = False
    update: BlobRef | None = None
    masked: bool = False
    metrics: TaskMetrics | None = None
    load: Load | None = None

    @property
    def choice(self) -> TierChoice:
        """The sub-model taken."""
        return next(choice for choice in self.offer.choices if choice.tier == self.tier)

    def seconds_left(self, now_unix: float | None = None) -> float:
        """Return the time until the round closes.

        It is never more than the offer gave: a board's clock may jump back at boot.
        """
        now = time.time() if now_unix is None else now_unix
        return min(self.deadline_unix - now, self.offer.seconds_left)


class TaskStore:
    """The record on disk, in the agent's state folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "task.json"

    def save(self, record: StoredTask) -> None:
        """Replace the record atomically.

        Raises:
            StorageError: it cannot be written; the old one is still there.
        """
        write_atomically(self.path, record.model_dump_json(indent=1).encode())

    def load(self) -> tuple[StoredTask | None, str | None]:
        """Load the record.

        Returns:
            The record, None where there is none that can be read; and why one that cannot be read
            has been set aside, None where all is well.
        """
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return None, None
        except OSError as error:
            return None, f"cannot read {self.path}: {error.strerror or error}"
        try:
            return StoredTask.model_validate_json(text), None
        except ValidationError as error:
            # Kept for whoever looks into it; a task that is lost is offered again.
            aside = self.path.with_suffix(".unreadable")
            with contextlib.suppress(OSError):
                self.path.replace(aside)
            problem = (
                f"the task record (version {_version_of(text)}) is unreadable, "
                f"kept as {aside}: {error.error_count()} errors"
            )
            return None, problem

    def clear(self) -> None:
        """Forget the task; a record that cannot be deleted is no error, its deadline ends it."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)


def _version_of(text: bytes) -> object:
    with contextlib.suppress(ValueError, AttributeError):
        return json.loads(text).get("version")
    return None


def resume_event(record: StoredTask | None, blobs: BlobStore) -> Event:
    """Return where a restarted agent goes on: the recovery map.

    The crash that led here is already counted.
    """
    if record is None:
        return Event.READY
    if record.seconds_left() <= 0:
        # The round is over; nobody waits for the result and nobody needs to be told.
        return Event.RESUME_EXPIRED
    if record.crashes >= CRASH_LIMIT or record.outages >= OUTAGE_LIMIT:
        return Event.RESUME_POISONED
    if record.phase == "uploading" and record.update is not None and record.metrics is not None:
        # The update is finished. The server may have all, some or none of it: it says so when it
        # hears Done.
        with contextlib.suppress(BlobError):
            blobs.read(record.update.digest)
            return Event.RESUME_UPLOAD
        # It was damaged on disk: compute it again, there is still time.
    # fetching: chunks on disk count, the missing ones are asked for. sizing, training, measuring:
    # nothing but the blobs is worth keeping; fetching checks them and goes on at once.
    return Event.RESUME_FETCH
