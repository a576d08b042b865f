"""The device's memory across restarts: one record of the current task.

The record is written before the agent acts on the task.

A state first saves the record with its own name and then acts, so after a power cut the record
names what may have begun. ``resume_event`` decides everything about recovery.
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

CRASH_LIMIT = 3  # a task that crashed the agent this often is refused instead of tried again
# So is a task during which the board restarted so often: its power supply may be too weak to
# compute.
OUTAGE_LIMIT = 20

Phase = Literal["fetching", "sizing", "training", "measuring", "uploading"]


class StoredTask(FrozenModel):
    """The state that must survive a power cut.

    Attributes:
        version: version of this schema; a record of another version is set aside.
        phase: the state that saved it.
        offer: the offer, unchanged.
        tier: the chosen sub-model.
        chosen: false while the sub-model is only measured, to choose one.
        efficiency: the system efficiency that the board chose by; None where it did not measure.
        deadline_unix: when the round closes by the board's clock, in seconds since 1970.
        boot: id of the board's boot in which it was saved.
        crashes: how often the agent restarted, within one boot of the board, without having ended
            this task or itself.
        outages: how often the board itself restarted meanwhile, which says nothing about the task.
        settled: the agent ended on purpose, so a restart is not a crash.
        update: the finished update, once the upload begins.
        masked: whether the update is masked for a secure sum, whose keys exist only in memory.
        metrics: sent with the update.
        load: the computation, once sizing, training or measuring begins.
    """

    version: Literal[3] = 3
    phase: Phase
    offer: Offer
    tier: str
    chosen: bool = True
    efficiency: float | None = None
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
        """The chosen sub-model."""
        return next(choice for choice in self.offer.choices if choice.tier == self.tier)

    def seconds_left(self, now_unix: float | None = None) -> float:
        """Return the time until the round closes.

        It is never more than the offer allowed: a board's clock may jump back at boot.
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
            StorageError: it cannot be written; the old one is intact.
        """
        write_atomically(self.path, record.model_dump_json(indent=1).encode())

    def load(self) -> tuple[StoredTask | None, str | None]:
        """Load the record.

        Returns:
            The record, None if there is none that can be read; and why an unreadable record
            has been set aside, None if all is well.
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
            # Kept for inspection; the server offers a lost task again.
            aside = self.path.with_suffix(".unreadable")
            with contextlib.suppress(OSError):
                self.path.replace(aside)
            problem = (
                f"the task record (version {_version_of(text)}) is unreadable, "
                f"kept as {aside}: {error.error_count()} errors"
            )
            return None, problem

    def clear(self) -> None:
        """Forget the task; if the record cannot be deleted, its deadline ends it."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)


def _version_of(text: bytes) -> object:
    with contextlib.suppress(ValueError, AttributeError, RecursionError):
        return json.loads(text).get("version")
    return None


def resume_event(record: StoredTask | None, blobs: BlobStore) -> Event:
    """Return the event with which a restarted agent resumes.

    The crash before this restart is already counted.
    """
    if record is None:
        return Event.READY
    if record.seconds_left() <= 0:
        # The round is over: nobody waits for the result, and the server needs no message.
        return Event.RESUME_EXPIRED
    if record.crashes >= CRASH_LIMIT or record.outages >= OUTAGE_LIMIT:
        return Event.RESUME_POISONED
    if record.phase == "uploading" and record.update is not None and record.metrics is not None:
        # The update is finished. The server may have all, some or none of it: it answers that when
        # it receives Done.
        with contextlib.suppress(BlobError):
            blobs.read(record.update.digest)
            return Event.RESUME_UPLOAD
        # It was damaged on disk: compute it again, there is still time.
    # fetching: chunks on disk count, and the missing ones are requested. sizing, training,
    # measuring: only the blobs are worth keeping; fetching verifies them and continues immediately.
    return Event.RESUME_FETCH
