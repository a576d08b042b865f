"""What the store returns: frozen values, one for each table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from broker_server.machine import RoundState
from fleet_protocol.control import VersionEvaluation
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages import BlobRef, Profile, TaskMetrics, TierChoice

__all__ = [
    "Alternative",
    "Alternatives",
    "DeviceRecord",
    "EventRecord",
    "RefusalRecord",
    "RoundRecord",
    "RunRecord",
    "TaskPhase",
    "TaskRecord",
    "VersionRecord",
]


class TaskPhase(str, Enum):
    """Where one device's part in a round is, as the server knows it."""

    OFFERED = "offered"
    RECEIVED = "received"  # its update is checked and on disk
    MERGED = "merged"
    REFUSED = "refused"  # by the server, for good
    DECLINED = "declined"  # by the device
    MISSED = "missed"  # the round closed without it

    @property
    def answered(self) -> bool:
        """Nothing more is awaited from the device."""
        return self is not TaskPhase.OFFERED


@dataclass(frozen=True)
class RunRecord:
    """A run.

    Attributes:
        id: of the run.
        fleet: name of the fleet.
        arch: name of the architecture.
        config: FleetConfig as JSON, paths absolute.
        status: ``running`` until it ends, also while no server works on it.
        detail: why it ended, if not by finishing.
        created_at: seconds since the epoch.
        ended_at: the same.
        wire_bytes: see `broker_server.accounting`.
        payload_bytes: the same.
    """

    id: str
    fleet: str
    arch: str
    config: str
    status: Literal["running", "finished", "failed", "stopped"]
    detail: str | None
    created_at: float
    ended_at: float | None
    wire_bytes: int
    payload_bytes: int


@dataclass(frozen=True)
class DeviceRecord:
    """A device that was ever seen.

    Attributes:
        fleet: name of the fleet.
        id: of the device.
        online: as last heard.
        state: of the agent's machine.
        profile: what it last said about itself, None if it never did.
        first_seen_at: seconds since the epoch.
        last_seen_at: the same.
    """

    fleet: str
    id: str
    online: bool
    state: str
    profile: Profile | None
    first_seen_at: float
    last_seen_at: float


@dataclass(frozen=True)
class RoundRecord:
    """A round.

    Attributes:
        run: id of the run.
        number: from 1; abandoned rounds count.
        state: where it is.
        version: the global version it starts from.
        quorum: updates it needs.
        reason: why it was abandoned.
        planned_at: seconds since the epoch.
        opened_at: when offers first went out.
        ended_at: when it was closed or abandoned.
        evaluation: of the version it made.
        note: why it was not evaluated.
    """

    run: str
    number: int
    state: RoundState
    version: int
    quorum: int
    reason: str | None
    planned_at: float
    opened_at: float | None
    ended_at: float | None
    evaluation: VersionEvaluation | None
    note: str | None


class Alternative(TierChoice):
    """A sub-model that a device may take.

    Attributes:
        plan_key: name of the plan in its round.
    """

    plan_key: str


class Alternatives(FrozenModel):
    """Sub-models that a device may take instead of its task's.

    Attributes:
        items: in the order they are offered.
    """

    items: tuple[Alternative, ...]


@dataclass(frozen=True)
class TaskRecord:
    """One device's part in a round.

    Attributes:
        id: of the task.
        run: id of the run.
        round: number of the round.
        device: id of the device.
        kind: ``train`` or ``statistics``.
        tier: id of the tier.
        plan_key: name of the plan in its round.
        version: the global version its weights were cut from.
        artifact_set: the manifest.
        weights: the slice.
        others: further sub-models that the device may take instead.
        phase: where it is.
        detail: why it was refused or declined.
        update_digest: of the update on disk.
        update_size: its bytes.
        metrics: what the device measured.
        received_at: seconds since the epoch.
    """

    id: str
    run: str
    round: int
    device: str
    kind: Literal["train", "statistics"]
    tier: str
    plan_key: str
    version: int
    artifact_set: BlobRef
    weights: BlobRef
    phase: TaskPhase = TaskPhase.OFFERED
    detail: str | None = None
    update_digest: str | None = None
    update_size: int | None = None
    metrics: TaskMetrics | None = None
    received_at: float | None = None
    others: Alternatives | None = None

    @property
    def choices(self) -> tuple[Alternative, ...]:
        """What the device is offered: the task's own sub-model first."""
        own = Alternative(tier=self.tier, artifact_set=self.artifact_set, weights=self.weights, plan_key=self.plan_key)
        return (own, *(self.others.items if self.others is not None else ()))

    def taking(self, tier: str) -> TaskRecord:
        """The task with the sub-model that the device took in the first place; as it is if that was not offered."""
        taken: Mapping[str, Alternative] = {item.tier: item for item in self.choices}
        if tier == self.tier or tier not in taken:
            return self
        rest = tuple(item for item in self.choices if item.tier != tier)
        return replace(
            self,
            tier=tier,
            plan_key=taken[tier].plan_key,
            artifact_set=taken[tier].artifact_set,
            weights=taken[tier].weights,
            others=Alternatives(items=rest),
        )

    def receiving(self, update: BlobRef, metrics: TaskMetrics) -> TaskRecord:
        """The task once its update is checked and on the disk.

        Args:
            update: its digest and size.
            metrics: what the device measured.
        """
        return replace(
            self,
            phase=TaskPhase.RECEIVED,
            update_digest=update.digest,
            update_size=update.size,
            metrics=metrics,
        )


@dataclass(frozen=True)
class VersionRecord:
    """A global version.

    Attributes:
        run: id of the run.
        number: 0 for the initial weights, then one for each closed round.
        round: that made it.
        digest: of its weights.
        state_digest: of the server optimizer's state, None if it has none.
        statistics_digest: of the batch norm statistics it was evaluated with.
        created_at: seconds since the epoch.
        evaluation: on the server's test set.
    """

    run: str
    number: int
    round: int
    digest: str
    state_digest: str | None
    statistics_digest: str | None
    created_at: float
    evaluation: VersionEvaluation | None


@dataclass(frozen=True)
class EventRecord:
    """A line of the log.

    Attributes:
        id: counts up.
        at: seconds since the epoch.
        run: id of the run, if it belongs to one.
        round: number of the round, if it belongs to one.
        device: id of the device, if it is about one.
        kind: short name, such as ``round-closed`` or ``refused``.
        detail: for the reader.
    """

    id: int
    at: float
    run: str | None
    round: int | None
    device: str | None
    kind: str
    detail: str


@dataclass(frozen=True)
class RefusalRecord:
    """How often something was refused.

    Attributes:
        run: id of the run, empty outside one.
        device: id of the device, empty where it is not known.
        reason: value of a `RefusalReason`.
        by: ``server`` or ``device``.
        count: how often.
    """

    run: str
    device: str
    reason: str
    by: str
    count: int
