"""What `shoal status`, `devices`, `rounds`, `runs` and `compare` show, as frozen values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from broker_server.store.records import DeviceRecord, RoundRecord, RunRecord
from broker_server.store.task_records import TaskPhase, TaskRecord
from fleet_protocol.control import VersionEvaluation
from fleet_protocol.messages import Evaluation

SIMULATED_FLEET = "simulation"
"""Name of the fleet in the store of a simulation."""


@dataclass(frozen=True)
class StatusView:
    """The store at a glance.

    Attributes:
        run: the run shown, None if there was none yet.
        round: its newest round.
        rounds: rounds wanted.
        evaluation: newest evaluation of the global model.
        online: devices that are connected, as last stored.
        devices: devices that were ever seen.
        refusals: how often messages were refused in the run, by reason.
        insecure: whether it went over a network although nothing was signed.
        epsilon: epsilon of a device's part in it so far, None where it is not known.
        runs: every run of the store, newest first.
        as_of: when this was read, in seconds since the epoch.
        served: whether a server or a simulation works on the store; None where the file system does
            not tell.
        seconds_left: until the run's last round ends, as its newest rounds went; None unless it is
            going on.
        repeated: how many of its versions repeat an earlier one, each in the place of a round.
    """

    run: RunRecord | None
    round: RoundRecord | None
    closed: int
    rounds: int
    version: int | None
    evaluation: VersionEvaluation | None
    online: int
    devices: int
    refusals: Mapping[str, int]
    insecure: bool
    epsilon: float | None
    runs: tuple[RunRecord, ...]
    as_of: float = 0.0
    served: bool | None = None
    seconds_left: float | None = None
    repeated: int = 0

    @property
    def is_deserted(self) -> bool:
        """Whether the run should be going on, and no server works on it."""
        if self.run is None or self.served is not False:
            return False
        return self.run.ended_at is None

    @property
    def is_simulated(self) -> bool:
        """Whether the run is a simulation's."""
        return self.run is not None and self.run.fleet == SIMULATED_FLEET


@dataclass(frozen=True)
class RunView:
    """A run in a list.

    Attributes:
        rounds: rounds wanted.
        versions: number of the newest, of the one it repeats, and of the one that was promoted.
        evaluation: newest evaluation of the global model.
        seconds: how long it took, or has taken.
    """

    run: RunRecord
    strategy: str
    closed: int
    rounds: int
    versions: Mapping[str, int]
    evaluation: VersionEvaluation | None
    seconds: float


@dataclass(frozen=True)
class DeviceView:
    """A device with its part in a run.

    Attributes:
        tier: tier of its newest training task.
        phase: phase of its newest training task.
        merged: number of its updates that are in a global version.
        missed: rounds that closed or were abandoned without it.
        refused: how often the server refused a message of it, or it refused a task.
        train_seconds: mean over its updates.
        fetch_seconds: mean over its updates.
        resident_bytes: the largest it reported.
        examples: training samples, as last reported.
        evaluation: on its own held-out samples, if it keeps any, as in `TaskMetrics`.
        reason: why it takes no part, or took none in the newest round; empty where it does.
        remedy: what helps; empty where nothing needs to be done, or the reason says it.
    """

    device: DeviceRecord
    tier: str | None
    phase: TaskPhase | None
    merged: int
    missed: int
    refused: int
    train_seconds: float | None
    fetch_seconds: float | None
    resident_bytes: int | None
    examples: int | None
    evaluation: Evaluation | None
    reason: str
    remedy: str


@dataclass(frozen=True)
class RoundView:
    """A round with its tasks.

    Attributes:
        phases: number of training tasks in each phase.
        seconds: from the first offers to its end.
        tasks: its training tasks, by device.
        device_accuracy: mean over devices of their accuracies on their own held-out samples; None
            if none reports one.
        device_range: the lowest and the highest of them.
        device_metrics: the recipe's metrics over the held-out samples of all devices together.
        sent_bytes: size of the weights that its devices were offered; devices that share a plan are
            sent one copy.
        received_bytes: size of the updates that came.
        epsilon: as in `StatusView`, up to here.
    """

    round: RoundRecord
    phases: Mapping[str, int]
    seconds: float | None
    tasks: tuple[TaskRecord, ...]
    device_accuracy: float | None
    device_range: tuple[float, float] | None = None
    device_metrics: Mapping[str, float] = field(default_factory=dict)
    sent_bytes: int = 0
    received_bytes: int = 0
    epsilon: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side.

    Attributes:
        runs: their ids.
        settings: by dotted key, the values of settings that differ.
        accuracies: by number of the version, their accuracies; None where one was not judged.
    """

    runs: tuple[str, str]
    settings: Mapping[str, tuple[Any, Any]]
    accuracies: Mapping[int, tuple[float | None, float | None]]
