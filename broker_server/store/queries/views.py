"""The frozen values that `shoal status`, `devices`, `rounds`, `runs` and `compare` show."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from broker_server.store.records import DeviceRecord, RoundRecord, RunRecord
from broker_server.store.task_records import TaskPhase, TaskRecord
from fleet_protocol.control import VersionEvaluation
from fleet_protocol.messages import Evaluation

SIMULATED_FLEET = "simulation"
"""Name of the fleet in the store of a simulation; a fleet of boards may have it, too."""
SIMULATION_SETTINGS = "config.json"
"""File of a simulation's settings, in the folder around its store."""


@dataclass(frozen=True)
class StatusView:
    """An overview of the store.

    Attributes:
        run: the displayed run; None before the first run.
        round: newest round of the displayed run.
        closed: number of closed rounds.
        rounds: number of configured rounds.
        version: number of the newest global version.
        evaluation: newest evaluation of the global model.
        online: number of connected devices, as last stored.
        devices: number of devices that have ever connected.
        refusals: number of refused messages in the run, by reason.
        insecure: whether the run allowed messages without signatures over a network.
        epsilon: privacy loss (epsilon) of a device's participation in the run so far; None if it is
            unknown.
        runs: every run of the store, newest first.
        as_of: when this record was read, in seconds since the epoch.
        served: whether a server or a simulation is using the store; None if the file system does
            not support the check.
        seconds_left: estimated seconds until the run's last round ends, based on its newest rounds;
            None unless the run is in progress.
        repeated: number of versions in the run that repeat an earlier version instead of resulting
            from a round.
        simulated: whether the run belongs to a simulation.
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
    simulated: bool = False

    @property
    def is_deserted(self) -> bool:
        """Whether the run should be in progress, but no server is running it."""
        # None means that nobody knows, so nothing is reported.
        if self.run is None or self.served is not False:
            return False
        return self.run.ended_at is None


@dataclass(frozen=True)
class RunView:
    """A run in a list.

    Attributes:
        strategy: name of the strategy.
        closed: number of closed rounds.
        rounds: number of configured rounds.
        versions: numbers of the newest version, of the version that it repeats (if any), and of the
            promoted version.
        evaluation: newest evaluation of the global model.
        seconds: duration of the run in seconds, so far or in total.
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
        tier: tier of the device's newest training task.
        phase: phase of the device's newest training task.
        merged: number of the device's updates that were merged into a global version.
        missed: number of rounds that offered the device a task but closed or were abandoned without
            its update.
        refused: number of times that the server refused a message from the device, or the device
            refused a task.
        train_seconds: mean training time of the device's updates, in seconds.
        fetch_seconds: mean time from the offer until the weights were on the device's disk, in
            seconds.
        resident_bytes: largest peak memory that the device reported, in bytes.
        examples: number of training samples that the device last reported.
        evaluation: evaluation on the device's own held-out samples, if there are any, as in
            `TaskMetrics`.
        shared_evaluation: evaluation on the device's held-out samples without its private parts, as
            in `TaskMetrics`.
        reason: why the device does not take part, or did not take part in the newest round; empty
            if it takes part.
        remedy: how to resolve the problem in ``reason``; empty if nothing needs to be done, or if
            ``reason`` contains the remedy.
        served: whether a server or a simulation is using the store (see `StatusView`). If not,
            ``device.online`` shows the device's state when the server stopped.
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
    shared_evaluation: Evaluation | None
    reason: str
    remedy: str
    served: bool | None = None

    @property
    def is_online(self) -> bool:
        """Return whether the device is connected, as far as a server that works knows."""
        return self.device.online and self.served is not False


@dataclass(frozen=True)
class RoundView:
    """A round with its tasks.

    Attributes:
        phases: number of training tasks in each phase.
        clipped: number of updates that were scaled down to the bound on their norm.
        too_far: number of updates that were refused because their norm exceeded the bound.
        seconds: seconds from the first offers to the end of the round.
        tasks: training tasks of the round, by device.
        device_accuracy: mean of the devices' accuracies on their own held-out samples; None if no
            device reports one.
        device_range: lowest and highest accuracy of a device on its own held-out samples.
        device_metrics: values of the recipe's metrics over the held-out samples of all devices.
        sent_bytes: size in bytes of the weights that the server offered to the round's devices;
            weights that several devices receive are counted once.
        received_bytes: size in bytes of the updates that arrived.
        epsilon: privacy loss (epsilon) of a device's participation in the run up to this round.
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
    clipped: int = 0
    too_far: int = 0


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side.

    Attributes:
        runs: ids of the two runs.
        settings: the values of settings that differ, by dotted key.
        accuracies: accuracies of the two runs by version number; None for a version without an
            evaluation.
    """

    runs: tuple[str, str]
    settings: Mapping[str, tuple[Any, Any]]
    accuracies: Mapping[int, tuple[float | None, float | None]]
