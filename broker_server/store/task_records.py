"""One device's part in a round, as the store keeps it: its sub-models, and how far it is."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages import BlobRef, TaskMetrics, TierChoice


class TaskPhase(str, Enum):
    """Where one device's part in a round is, as the server knows it."""

    answered: bool  # the server expects no more of the device
    arrived: bool  # its update is here, to be merged

    OFFERED = "offered"
    RECEIVED = "received"  # its update is checked and on disk
    MERGED = "merged"
    LEFT_OUT = "left-out"  # it is as it should be, but the merge takes others
    REFUSED = "refused"  # by the server, for good
    DECLINED = "declined"  # by the device
    MISSED = "missed"  # the round closed without it

    def __init__(self, word: str) -> None:
        self.answered = word != "offered"
        self.arrived = word in {"received", "merged"}


class Alternative(TierChoice):
    """A sub-model that a device may take, with the name of its plan in the round."""

    plan_key: str


@lru_cache(maxsize=256)
def alternative(tier: str, artifact_set: BlobRef, weights: BlobRef, plan_key: str) -> Alternative:
    """Return a sub-model that a device may take: the same few for all tasks of a round."""
    return Alternative(tier=tier, artifact_set=artifact_set, weights=weights, plan_key=plan_key)


class Alternatives(FrozenModel):
    """Sub-models that a device may take instead of its task's, in the order they are offered."""

    items: tuple[Alternative, ...]


class Timing(FrozenModel):
    """The times of a task, in seconds from the offers, on the clock of the run.

    Attributes:
        answered: when the device answered, None if it did not.
        left: when the device left, if it was away when the collecting ended.
    """

    answered: float | None = None
    left: float | None = None


class Screening(FrozenModel):
    """How an update counts in its round.

    Attributes:
        norm: Euclidean norm of its difference to the weights that the device was sent.
        bound: largest norm that was allowed in its tier, None for any.
        scale: factor of the difference, below 1 where it was clipped to the bound.
        samples: it counted with.
        declared: samples that the device said it had.
        round: whose version it is in, where that need not be the one in which it was asked for.
        weight: of its difference, below 1 where it was made from an earlier version.
    """

    norm: float
    bound: float | None = None
    scale: float = 1.0
    samples: int
    declared: int
    round: int | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class Outcome:
    """The result of an update when its round was merged."""

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
    version: int  # the global version its weights were cut from
    artifact_set: BlobRef  # the manifest
    weights: BlobRef  # the slice
    phase: TaskPhase = TaskPhase.OFFERED
    detail: str | None = None  # why it was refused or declined
    update_digest: str | None = None  # of the update on disk
    update_size: int | None = None
    metrics: TaskMetrics | None = None  # what the device measured
    received_at: float | None = None  # seconds since the epoch
    others: Alternatives | None = None  # further sub-models that the device may take instead
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
        """Return the task with the sub-model that the device took in the first place.

        A tier that was not offered, or is there already, changes nothing.
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
        """Return the task once its update is checked and on the disk.

        Args:
            digest: digest of the update on the disk.
            size: bytes of the update as it was sent.
            metrics: what the device measured.
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
        received_at: when its newest update came, in seconds since the epoch; None before the first.
    """

    newest: TaskRecord
    measured: TaskRecord | None
    totals: Mapping[str, Any]
    received_at: float | None = None


class MergedUpdate(NamedTuple):
    """The fields of a task whose update was merged that later rounds compare theirs with."""

    device: str
    tier: str
    screening: Screening


class PlannedTask(NamedTuple):
    """The fields of a training task that its plan needs, as `TaskRecord` has them.

    The other fields of many tasks would take long to read.
    """

    round: int
    version: int
    device: str
    tier: str
    plan_key: str
    phase: str
