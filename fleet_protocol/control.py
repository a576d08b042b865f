"""Events of a server about its runs.

Events are sent on ``Topics.server_events``; the same events reach an in-process caller as values,
so that a progress display is written only once.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Literal

from pydantic import Field

from fleet_protocol.errors import RefusalReason
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages import Evaluation, Predicted, TaskMetrics
from fleet_protocol.messages.parsing import reader
from fleet_protocol.messages.values import Name
from fleet_protocol.requests import Wish


class VersionEvaluation(Evaluation):
    """Loss and accuracy of a global version.

    Attributes:
        tiers: evaluations of further tiers by id, each as the model that is sent to its devices.
    """

    tiers: Mapping[str, Evaluation] = Field(default_factory=dict)

    @property
    def summary(self) -> str:
        """A summary: ``accuracy 0.8123, loss 0.4321; w1.00-d2 0.7654, w1.00-d4 0.7890``."""
        tiers = [f"{tier} {evaluation.shown:.4f}" for tier, evaluation in self.tiers.items()]
        return f"{self.text()}; {', '.join(tiers)}" if tiers else self.text()

    def of_tier(self, tier: str) -> "VersionEvaluation | None":
        """Return the evaluation of a further tier; None if there is none."""
        return VersionEvaluation(**dict(self.tiers[tier])) if tier in self.tiers else None


class _RunEvent(FrozenModel):
    """The common fields of events.

    Attributes:
        run: id of the run.
        seconds: seconds since the run started or was resumed.
    """

    run: Name
    seconds: float = Field(ge=0)


class RunStarted(_RunEvent):
    """A run begins, or continues after a restart of the server.

    Attributes:
        request: id of the request that started the run, if any.
        arch: name of the architecture.
        strategy: name of the strategy.
        rounds: number of rounds that the run should close.
        closed: number of rounds that were already closed.
    """

    type: Literal["run-started"] = "run-started"
    request: str | None = None
    arch: str
    strategy: str
    rounds: int
    closed: int = 0


class RunRejected(FrozenModel):
    """A request was refused.

    Attributes:
        request: id of the refused request.
        detail: why the request was refused, and what to do.
        exit_code: exit code of the command that sent the request.
    """

    type: Literal["run-rejected"] = "run-rejected"
    request: str
    detail: str
    exit_code: int = 1


class RunSteered(_RunEvent):
    """The server carries out an operator's request.

    Attributes:
        request: id of the operator's request.
        wish: the requested action; see `SteerRequest`.
    """

    type: Literal["run-steered"] = "run-steered"
    request: str
    wish: Wish


class FleetChanged(_RunEvent):
    """Devices came online or went offline while a round was waiting for devices.

    Attributes:
        online: ids of the devices that are connected.
        eligible: number of connected devices that can take part in the round.
        needed: number of devices for which the next round waits.
    """

    type: Literal["fleet-changed"] = "fleet-changed"
    online: tuple[str, ...]
    eligible: int
    needed: int


class RoundStarted(_RunEvent):
    """The server sends the offers of a round, or sends them again after a restart.

    Attributes:
        round: number of the round, counted from 1; abandoned rounds count as well.
        version: number of the global version from which the server cut the weights.
        devices: the selected devices, with the tier of each.
        deadline_seconds: seconds until the round closes.
    """

    type: Literal["round-started"] = "round-started"
    round: int
    version: int
    devices: Mapping[str, str]
    deadline_seconds: float


class DeviceAccepted(_RunEvent):
    """A device accepted a task.

    Attributes:
        round: number of the round.
        device: id of the device.
        kind: kind of the task.
        tier: id of the tier that the device trains.
    """

    type: Literal["device-accepted"] = "device-accepted"
    round: int
    device: str
    kind: Literal["train", "statistics"]
    tier: str


class DeviceProgressed(_RunEvent):
    """A device reports its progress.

    Attributes:
        round: number of the round.
        device: id of the device.
        epoch: number of finished epochs.
        epochs: total number of epochs in the task.
        step: number of finished steps.
        loss: mean training loss of the last finished epoch.
    """

    type: Literal["device-progressed"] = "device-progressed"
    round: int
    device: str
    epoch: int
    epochs: int
    step: int
    loss: float | None = None


class UpdateReceived(_RunEvent):
    """An update has been checked and is on the server's disk.

    Attributes:
        round: number of the round.
        device: id of the device.
        kind: kind of the task.
        tier: id of the tier that the device trained.
        size: size of the update in bytes.
        metrics: measurements of the device.
    """

    type: Literal["update-received"] = "update-received"
    round: int
    device: str
    kind: Literal["train", "statistics"]
    tier: str
    size: int
    metrics: TaskMetrics


class UpdateRefused(_RunEvent):
    """The server refused a message or update, or a device refused its task.

    Attributes:
        round: number of the round; None if the message belongs to no round.
        device: id of the device, if known.
        by: the side that refused.
        reason: name under which the refusal is counted.
        detail: details of the refusal, for the log.
    """

    type: Literal["update-refused"] = "update-refused"
    round: int | None = None
    device: str | None = None
    by: Literal["server", "device"]
    reason: RefusalReason
    detail: str


class StatisticsStarted(_RunEvent):
    """The server requests batch norm statistics of the new global version from the devices.

    Attributes:
        round: number of the round.
        devices: ids of the selected devices.
    """

    type: Literal["statistics-started"] = "statistics-started"
    round: int
    devices: tuple[str, ...]


class RoundClosed(_RunEvent):
    """A round closed with a new global version.

    Attributes:
        round: number of the round.
        version: number of the new global version.
        merged: the devices whose updates the version includes, with the tier of each.
        missing: selected devices whose updates the version does not include.
        evaluation: evaluation of the new version on the server's test set, if it was evaluated;
            also None if the evaluation runs while the next round trains, see `RoundJudged`.
        note: why the version was not evaluated, if an evaluation was due.
        round_seconds: seconds from the offers until the round closed.
        wire_bytes: bytes that have passed through the server's connection in the run so far; see
            `broker_server.rounds.accounting`.
        payload_bytes: payload bytes in the run so far; see `broker_server.rounds.accounting`.
        epsilon: privacy loss (epsilon) of a device's participation in the run so far; None if no
            noise is added.
    """

    type: Literal["round-closed"] = "round-closed"
    round: int
    version: int
    merged: Mapping[str, str]
    missing: tuple[str, ...] = ()
    evaluation: VersionEvaluation | None = None
    note: str | None = None
    round_seconds: float
    wire_bytes: int
    payload_bytes: int
    epsilon: float | None = None


class RoundJudged(_RunEvent):
    """The evaluation of a closed round's version, computed while the next round was training.

    Attributes:
        round: number of the closed round.
        version: number of the global version that the round created.
        evaluation: evaluation of that version on the server's test set.
        note: why there is no evaluation; None if there is one.
    """

    type: Literal["round-judged"] = "round-judged"
    round: int
    version: int
    evaluation: VersionEvaluation | None = None
    note: str | None = None


class RoundAbandoned(_RunEvent):
    """A round ended without a new global version.

    Attributes:
        round: number of the round.
        reason: why the round was abandoned.
        again: whether the server will try another round.
    """

    type: Literal["round-abandoned"] = "round-abandoned"
    round: int
    reason: str
    again: bool


class RunFinished(_RunEvent):
    """A run has ended.

    Attributes:
        status: how the run ended.
        version: number of the last global version.
        rounds: number of closed rounds.
        evaluation: evaluation of the last version, if it was evaluated.
        wire_bytes: bytes that passed through the server's connection during the whole run; see
            `broker_server.rounds.accounting`.
        payload_bytes: payload bytes during the whole run; see `broker_server.rounds.accounting`.
        error: what failed, if anything did.
        early: why the run finished before its last round, if it did.
        exit_code: exit code of a command that waited for the run.
    """

    type: Literal["run-finished"] = "run-finished"
    status: Literal["finished", "failed", "stopped"]
    version: int
    rounds: int
    evaluation: VersionEvaluation | None = None
    wire_bytes: int
    payload_bytes: int
    error: str | None = None
    early: str | None = None
    exit_code: int = 0


RunEvent = Annotated[
    RunStarted
    | RunRejected
    | RunSteered
    | FleetChanged
    | RoundStarted
    | DeviceAccepted
    | DeviceProgressed
    | UpdateReceived
    | UpdateRefused
    | StatisticsStarted
    | RoundClosed
    | RoundJudged
    | RoundAbandoned
    | RunFinished
    | Predicted,
    Field(discriminator="type"),
]

parse_run_event: Callable[[bytes], RunEvent] = reader(RunEvent, "event", None)
