"""The frozen values that the store returns for runs, devices, rounds, versions and the log.

Each table has one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import to_json

from broker_server.store.machine import RoundEvent, RoundState
from fleet_protocol.control import VersionEvaluation
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages import Profile

_STORED = BeforeValidator(
    lambda given: to_json(given) if isinstance(given, dict) else given
)  # see `queries.to_json_values`


@dataclass(frozen=True)
class RunRecord:
    """A run.

    Attributes:
        id: id of the run.
        fleet: name of the fleet.
        arch: name of the architecture.
        config: FleetConfig as JSON, with absolute paths.
        status: state of the run; ``running`` or ``paused`` until the run ends, even while no server
            is working on it.
        detail: why the run ended, if it ended before its last round.
        created_at: when the run was created, in seconds since the epoch.
        ended_at: when the run ended, in seconds since the epoch.
        wire_bytes: bytes that passed through the server's connection during the run; see
            `broker_server.rounds.accounting`.
        payload_bytes: payload bytes during the run; see `broker_server.rounds.accounting`.
        name: name that a user gave to the run, unique in the store.
    """

    id: str
    fleet: str
    arch: str
    config: Annotated[str, _STORED, WithJsonSchema({"type": "object"})]
    status: Literal["running", "paused", "finished", "failed", "stopped"]
    detail: str | None
    created_at: float
    ended_at: float | None
    wire_bytes: int
    payload_bytes: int
    name: str | None = None

    @property
    def shown(self) -> str:
        """Return the run's name and its id, for people."""
        return self.id if self.name is None else f"{self.name} ({self.id})"

    def is_meant_by(self, text: str) -> bool:
        """Return whether a text is the run's name, its id, or the beginning of its id."""
        return self.name == text or self.id.startswith(text)


@dataclass(frozen=True)
class DeviceRecord:
    """A device that has ever connected.

    Attributes:
        fleet: name of the fleet.
        id: id of the device.
        online: whether the device is connected, as last reported.
        state: state of the agent's state machine, as last reported.
        profile: the device's last profile; None if the device never sent a profile.
        first_seen_at: when the device first connected, in seconds since the epoch.
        last_seen_at: when the server last received a message from the device, in seconds since the
            epoch.
    """

    fleet: str
    id: str
    online: bool
    state: str
    profile: Profile | None
    first_seen_at: float
    last_seen_at: float


class LeftOut(FrozenModel):
    """Devices that a round did not select.

    Attributes:
        reasons: reasons why devices were not selected, by device id.
        more: number of devices that were not selected and are not listed in ``reasons``.
    """

    reasons: Mapping[str, str]
    more: int = 0


@dataclass(frozen=True)
class RoundRecord:
    """A round.

    Attributes:
        run: id of the run.
        number: number of the round, counted from 1; abandoned rounds count as well.
        state: state of the round.
        version: number of the global version from which the round starts.
        quorum: number of updates that the round needs before it can close.
        reason: why the round was abandoned.
        planned_at: when the round was planned, in seconds since the epoch.
        opened_at: when the first offers were sent, in seconds since the epoch.
        ended_at: when the round closed or was abandoned, in seconds since the epoch.
        evaluation: evaluation of the version that the round made.
        note: why the round's version was not evaluated.
        wanted: number of updates after which the round stopped waiting for more; None for a round
            that an earlier version of Shoal planned.
        ending: event that ended the collection of updates.
        collect_seconds: seconds, by the run's clock, from the offers until the collection of
            updates ended or the round was abandoned.
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
    wanted: int | None = None
    ending: RoundEvent | None = None
    collect_seconds: float | None = None
    left_out: LeftOut | None = None


@dataclass(frozen=True)
class VersionRecord:
    """A global version.

    Attributes:
        run: id of the run.
        number: number of the version: 0 for the initial weights, increased by 1 with each closed
            round.
        round: number of the round that created the version.
        digest: digest of the version's weights.
        state_digest: digest of the server optimizer's state; None if the optimizer has none.
        statistics_digest: digest of the batch norm statistics with which the version was evaluated.
        created_at: when the version was created, in seconds since the epoch.
        evaluation: evaluation on the server's test set.
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
        id: number of the line; later lines have larger numbers.
        at: when the event happened, in seconds since the epoch.
        run: id of the run, if the event concerns one.
        round: number of the round, if the event concerns one.
        device: id of the device, if the event concerns one.
        kind: short name of the event, such as ``round-closed`` or ``refused``.
        detail: text that describes the event.
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
        device: id of the device; empty if unknown.
        reason: value of a `RefusalReason`.
        by: ``server`` or ``device``.
    """

    run: str
    device: str
    reason: str
    by: str
    count: int
