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
        config: FleetConfig as JSON, paths absolute.
        status: ``running`` until it ends, also while no server works on it.
        detail: why it ended, if not by its last round.
        created_at: seconds since the epoch.
        wire_bytes: see `broker_server.rounds.accounting`.
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


@dataclass(frozen=True)
class DeviceRecord:
    """A device that was ever seen.

    Attributes:
        online: as last heard.
        state: of the agent's machine.
        profile: what it last said about itself, None if it never did.
        first_seen_at: seconds since the epoch.
    """

    fleet: str
    id: str
    online: bool
    state: str
    profile: Profile | None
    first_seen_at: float
    last_seen_at: float


class LeftOut(FrozenModel):
    """Devices that a round did not ask.

    Attributes:
        reasons: why, by id.
        more: how many others there were.
    """

    reasons: Mapping[str, str]
    more: int = 0


@dataclass(frozen=True)
class RoundRecord:
    """A round.

    Attributes:
        number: from 1; abandoned rounds count.
        version: the global version it starts from.
        quorum: updates it needs.
        reason: why it was abandoned.
        planned_at: seconds since the epoch.
        opened_at: when offers first went out.
        evaluation: of the version it made.
        note: why it was not evaluated.
        wanted: updates with which nobody else was waited for; None where an earlier version planned
            the round.
        ending: the event that ended the collecting.
        collect_seconds: from the offers to that event, or until the round was given up, on the
            clock of the run.
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
        kind: short name, such as ``round-closed`` or ``refused``.
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
    """

    run: str
    device: str
    reason: str
    by: str
    count: int
