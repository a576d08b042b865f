"""Events of a server about its runs.

Events travel on ``Topics.server_events``; the same events reach an in-process caller as values, so
that a progress display is written once.
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
        tiers: of further tiers by id, each as the model that its devices are sent.
    """

    tiers: Mapping[str, Evaluation] = Field(default_factory=dict)

    @property
    def summary(self) -> str:
        """A summary: ``accuracy 0.8123, loss 0.4321; w1.00-d2 0.7654, w1.00-d4 0.7890``."""
        tiers = [f"{tier} {evaluation.shown:.4f}" for tier, evaluation in self.tiers.items()]
        return f"{self.text()}; {', '.join(tiers)}" if tiers else self.text()

    def of(self, tier: str) -> "VersionEvaluation | None":
        """Return the evaluation of a further tier; None if there is none."""
        return VersionEvaluation(**dict(self.tiers[tier])) if tier in self.tiers else None


class _RunEvent(FrozenModel):
    """What every event carries.

    Attributes:
        run: id of the run.
        seconds: since the run started, or was resumed.
    """

    run: Name
    seconds: float = Field(ge=0)


class RunStarted(_RunEvent):
    """A run begins, or goes on after a restart of the server.

    Attributes:
        request: the request it answers, if any.
        arch: name of the architecture.
        strategy: name of the strategy.
        rounds: rounds to close.
        closed: rounds that were closed before.
    """

    type: Literal["run-started"] = "run-started"
    request: str | None = None
    arch: str
    strategy: str
    rounds: int
    closed: int = 0


class RunRejected(FrozenModel):
    """A request was not taken.

    Attributes:
        request: the request.
        detail: why, and what to do.
        exit_code: what a command line that asked for it ends with.
    """

    type: Literal["run-rejected"] = "run-rejected"
    request: str
    detail: str
    exit_code: int = 1


class RunSteered(_RunEvent):
    """The server does what an operator asked for.

    Attributes:
        request: what it answers.
        wish: see `SteerRequest`.
    """

    type: Literal["run-steered"] = "run-steered"
    request: str
    wish: Wish


class FleetChanged(_RunEvent):
    """Devices came or went while a round waits for them.

    Attributes:
        online: ids of the devices that are connected.
        eligible: how many of them can take part.
        needed: how many the next round waits for.
    """

    type: Literal["fleet-changed"] = "fleet-changed"
    online: tuple[str, ...]
    eligible: int
    needed: int


class RoundStarted(_RunEvent):
    """Offers of a round go out, or go out again after a restart of the server.

    Attributes:
        round: number of the round, from 1; abandoned rounds count.
        version: global version the weights were cut from.
        devices: asked devices to their tiers.
        deadline_seconds: time until it closes.
    """

    type: Literal["round-started"] = "round-started"
    round: int
    version: int
    devices: Mapping[str, str]
    deadline_seconds: float


class DeviceAccepted(_RunEvent):
    """A device took a task.

    Attributes:
        round: number of the round.
        device: id.
        kind: kind of the task.
        tier: what it trains.
    """

    type: Literal["device-accepted"] = "device-accepted"
    round: int
    device: str
    kind: Literal["train", "statistics"]
    tier: str


class DeviceProgressed(_RunEvent):
    """A device tells how far it is.

    Attributes:
        round: number of the round.
        device: id.
        epoch: finished epochs.
        epochs: epochs in all.
        step: finished steps.
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
    """An update is checked and on the server's disk.

    Attributes:
        round: number of the round.
        device: id.
        kind: kind of the task.
        tier: what it trained.
        size: bytes of the update.
        metrics: what the device measured.
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
        round: number of the round, None if what came belongs to none.
        device: id, as far as it is known.
        by: who refused.
        reason: counted under this name.
        detail: for the log.
    """

    type: Literal["update-refused"] = "update-refused"
    round: int | None = None
    device: str | None = None
    by: Literal["server", "device"]
    reason: RefusalReason
    detail: str


class StatisticsStarted(_RunEvent):
    """The server asks devices for batch norm statistics of the new global version.

    Attributes:
        round: number of the round.
        devices: ids of the asked devices.
    """

    type: Literal["statistics-started"] = "statistics-started"
    round: int
    devices: tuple[str, ...]


class RoundClosed(_RunEvent):
    """A round made a new global version.

    Attributes:
        round: number of the round.
        version: number of the new global version.
        merged: devices whose updates are in it, to their tiers.
        missing: asked devices whose updates are not.
        evaluation: of the new version on the server's test set, if it was evaluated; None also
            where that goes on while the next round trains, see `RoundJudged`.
        note: why it was not evaluated, if it should have been.
        round_seconds: from the offers to here.
        wire_bytes: of the server's connection in the run so far.
        payload_bytes: see ``broker_server.rounds.accounting``, in the run so far.
        epsilon: of a device's part in the run so far, None where nothing hides that.
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
    """What was found about the version of a closed round while the next one went on.

    Attributes:
        round: number of the closed round.
        version: number of its global version.
        evaluation: of that version on the server's test set.
        note: why there is none.
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
        reason: why.
        again: whether another round is tried.
    """

    type: Literal["round-abandoned"] = "round-abandoned"
    round: int
    reason: str
    again: bool


class RunFinished(_RunEvent):
    """A run is over.

    Attributes:
        status: how it ended.
        version: last global version.
        rounds: rounds closed.
        evaluation: of the last version, if it was evaluated.
        wire_bytes: of the server's connection in the whole run.
        payload_bytes: see ``broker_server.rounds.accounting``.
        error: what failed, if it did.
        early: why it finished before its last round, if it did.
        exit_code: what a command line that waited for it ends with.
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
