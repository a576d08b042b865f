"""One device's part in a round, as the store keeps it: its sub-models, and its progress."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

from broker_server.stages.screening import Screening
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages import BlobRef, TaskMetrics, TierChoice


class TaskPhase(str, Enum):
    """The state of one device's part in a round, as the server knows it."""

    answered: bool  # the server expects nothing more from the device
    arrived: bool  # its update has arrived, and can be merged

    OFFERED = "offered"
    RECEIVED = "received"  # its update is checked and on disk
    MERGED = "merged"
    LEFT_OUT = "left-out"  # it is valid, but the merge uses others
    REFUSED = "refused"  # by the server, for good
    DECLINED = "declined"  # by the device
    MISSED = "missed"  # the round closed without it

    def __init__(self, word: str) -> None:
        self.answered = word != "offered"
        self.arrived = word in {"received", "merged"}


class Alternative(TierChoice):
    """A sub-model that a device may train, with the name of its plan in the round."""

    plan_key: str


@lru_cache(maxsize=256)
def alternative(tier: str, artifact_set: BlobRef, weights: BlobRef, plan_key: str) -> Alternative:
    """Return a sub-model that a device may train; all tasks of a round share a few objects."""
    return Alternative(tier=tier, artifact_set=artifact_set, weights=weights, plan_key=plan_key)


class Alternatives(FrozenModel):
    """Sub-models that a device may train instead of its task's sub-model, in the offer's order."""

    items: tuple[Alternative, ...]


class Timing(FrozenModel):
    """The times of a task, in seconds from the offers, by the clock of the run.

    Attributes:
        answered: when the device answered; None if it did not answer.
        left: when the device went offline, if it was offline when the collection ended.
    """

    answered: float | None = None
    left: float | None = None


@dataclass(frozen=True)
class Outcome:
    """The outcome of an update when its round was merged."""

    phase: TaskPhase  # merged, left out or refused
    screening: Screening
    detail: str | None = None  # why it is not merged


@dataclass(frozen=True)
class TaskRecord:
    """One device's part in a round."""

    id: str
    run: str
    round: int
    device: str
    kind: Literal["train", "statistics"]
    tier: str
    plan_key: str  # name of the plan in its round
    version: int  # the global version from which its weights were cut
    artifact_set: BlobRef  # the manifest
    weights: BlobRef  # the slice
    phase: TaskPhase = TaskPhase.OFFERED
    detail: str | None = None  # why it was refused or declined
    update_digest: str | None = None  # of the update on disk
    update_size: int | None = None
    metrics: TaskMetrics | None = None  # measurements of the device
    received_at: float | None = None  # seconds since the epoch
    others: Alternatives | None = None  # further sub-models that the device may train instead
    timing: Timing | None = None
    screening: Screening | None = None

    @cached_property
    def choices(self) -> tuple[Alternative, ...]:
        """The sub-models that the device is offered: the task's own first."""
        own = alternative(self.tier, self.artifact_set, self.weights, self.plan_key)
        if self.others is None:
            return (own,)
        return (own, *self.others.items)

    def with_tier(self, tier: str) -> "TaskRecord":
        """Return the task with the sub-model that the device took moved to the first place.

        A tier that was not offered, or is first already, changes nothing.
        """
        if tier == self.tier:
            return self
        taken = None
        not_taken = []
        for choice in self.choices:
            if choice.tier == tier:
                taken = choice
            else:
                not_taken.append(choice)
        if taken is None:
            return self
        return replace(self, **dict(taken), others=Alternatives(items=tuple(not_taken)))

    def with_update(self, digest: str, size: int, metrics: TaskMetrics) -> "TaskRecord":
        """Return the task once its update is checked and on disk.

        Args:
            digest: digest of the update on the disk.
            size: bytes of the update as it was sent.
            metrics: measurements of the device.
        """
        return replace(
            self,
            phase=TaskPhase.RECEIVED,
            update_digest=digest,
            update_size=size,
            metrics=metrics,
        )


@dataclass(frozen=True)
class DevicePart:
    """One device's part in a run.

    Attributes:
        newest: its newest training task.
        measured: its newest training task with measurements, if any.
        totals: ``merged`` and ``missed`` rounds, mean ``train_seconds`` and ``fetch_seconds``,
            largest ``resident_bytes``.
        received_at: when its newest update arrived, in seconds since the epoch; None before the
            first.
    """

    newest: TaskRecord
    measured: TaskRecord | None
    totals: Mapping[str, Any]
    received_at: float | None = None


class MergedUpdate(NamedTuple):
    """The fields of a merged task with which later rounds compare theirs."""

    device: str
    tier: str
    screening: Screening


class PlannedTask(NamedTuple):
    """The fields of a training task that its plan needs, as `TaskRecord` has them.

    Reading the other fields of many tasks would take long.
    """

    round: int
    version: int
    device: str
    tier: str
    plan_key: str
    phase: str
