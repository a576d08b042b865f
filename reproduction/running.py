"""Run the arms of an experiment one after the other, and collect what was run before.

    <out>/<table>/<scale>/<arm>/seed-<n>/    the folder of one simulation
    <out>/<table>/<scale>/cache/             exported models and prepared data, shared by the arms

A file ``result.json`` in the folder of a simulation says that it is complete.

An arm that was stopped continues where it was, and so does one whose table asks for more rounds
than it had. An arm that is complete is not run again, nor is one that another arm of any table has
trained: runs that differ only in the clock train the same, if all devices are waited for and none
chooses by time. Complete runs are in the table.
"""

import contextlib
import os
import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from broker_server.settings.combinations import keeps
from broker_server.settings.traits import Trait
from broker_server.store import Store, TaskPhase
from broker_server.strategies.registry import STRATEGIES
from fleet_protocol import control
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.errors import ConfigError, DataError, ShoalError
from fleet_protocol.frozen import STORED, FrozenModel
from fleet_protocol.sizing import SizingConstants
from models.tier import Tier
from reproduction.experiment import Arm, Experiment, Scale, stated
from simulation.board_times import training_load
from simulation.clock import load_clock
from simulation.dynamics import Conditions
from simulation.results.history import (
    DEVICES,
    RoundRow,
    read_devices,
    read_history,
    write_history,
)
from simulation.settings import HOW_COMPUTED, NO_DEADLINE, SimulationConfig
from simulation.tables import EngineTable

_RESULT = "result.json"
_PACKAGES = (
    "shoal",
    "numpy",
    "onnxruntime-training-cpu",
    "onnxruntime",
    "torch",
    "onnx",
)
_KEPT_VERSIONS = 2  # older ones have no use, and a table's runs together would fill a disk

Watch = Callable[[RoundRow], None]


def rounds_with(
    config: SimulationConfig, folder: Path, trained: SimulationConfig
) -> tuple[RoundRow, ...]:
    """Return the rounds of a complete run as those of a configuration with another clock.

    Args:
        config: differs from the run's only in its clock, or not at all.
        folder: the folder of the run.
        trained: the run's own configuration.

    Returns:
        No rounds if the run's do not last as long as their slowest devices, or if time decides
        which device trains what.
    """
    rows = read_history(folder)
    if trained.clock == config.clock:
        return rows
    # A round also waited for updates that were not merged, which are not in the devices' file.
    if not _all_merged(folder) or _depends_on_time(config):
        return ()
    if _seconds(trained, folder) != [row.simulated_seconds for row in rows]:
        return ()
    timed: list[RoundRow] = []
    total = 0.0
    for row, seconds in zip(rows, _seconds(config, folder), strict=True):
        total += seconds
        timed.append(replace(row, simulated_seconds=seconds, simulated_total=total))
    return tuple(timed)


def _depends_on_time(config: SimulationConfig) -> bool:
    """Return whether time decides which device trains what."""
    rule = config.round
    has_dropout = any(kind.dropout for kind in config.devices.kinds)
    return (
        bool(rule.over_selection)
        or not keeps(config, Trait.ONE_VERSION)
        or rule.deadline_seconds < NO_DEADLINE
        or has_dropout
        or devices_choose(config)
    )


def devices_choose(config: SimulationConfig) -> bool:
    """Return whether every device chooses its own width before every round."""
    return STRATEGIES[config.strategy.name].settings is SizingConstants


def widths_in(config: SimulationConfig, folder: Path) -> dict[int, tuple[float | None, ...]]:
    """Return the widths of all devices by round; None for a device that did not train."""
    places = {name: place for place, name in enumerate(config.devices.ids)}
    widths: dict[int, list[float | None]] = {}
    for entry in read_devices(folder):
        row = widths.setdefault(entry.round, [None] * len(places))
        row[places[entry.device]] = Tier.parse(entry.tier).width
    return {number: tuple(row) for number, row in widths.items()}


def _all_merged(folder: Path) -> bool:
    """Return whether every update that was asked for was merged."""
    if not (folder / "store").exists():
        return False
    with contextlib.closing(Store(folder / "store", read_only=True)) as store:
        run = store.runs()[0].id
        for round_ in store.rounds(run):
            tasks = store.tasks(run, round_.number, "train")
            if any(task.phase is not TaskPhase.MERGED for task in tasks):
                return False
    return True


def _seconds(config: SimulationConfig, folder: Path) -> list[float]:
    """Return how long each round of a run takes with the clock of a configuration."""
    clock = load_clock(config.clock)
    ids = config.devices.ids
    devices = [clock.device(kind.type, kind.link) for kind in config.devices.kinds]
    conditions = Conditions(clock, devices, config.seed)
    slowest = dict[int, float]()
    for part in read_devices(folder):
        load = training_load(
            Tier.parse(part.tier).width, part.examples, config.train, part.payload_bytes
        )
        seconds = clock.device_seconds(conditions.of(ids.index(part.device), part.round), load)
        slowest[part.round] = max(slowest.get(part.round, 0.0), seconds)
    return list(slowest.values())


class StoppedError(ShoalError):
    """A run was interrupted; the same command goes on with it."""

    exit_code = 130


class _Record(FrozenModel):
    """``result.json``: that a run is complete, and what it was."""

    table: str
    scale: Scale
    arm: str
    config: SimulationConfig
    versions: Mapping[str, str]
    machine: str
    trained: str = ""
    stated: str = ""


@dataclass(frozen=True)
class ArmResult:
    """A complete run of an arm with one seed.

    Attributes:
        trained: for which table and arm, if not for its own.
        widths: that every device trained in every round, where the devices choose them.
        stated: digest of what the table stated when it ended; empty where that was not kept.
    """

    arm: Arm
    config: SimulationConfig
    rows: tuple[RoundRow, ...]
    versions: Mapping[str, str]
    machine: str
    trained: str = ""
    widths: Mapping[int, tuple[float | None, ...]] = field(default_factory=dict)
    stated: str = ""

    @property
    def seed(self) -> int:
        """Of the run."""
        return self.config.seed

    @property
    def seconds(self) -> float:
        """Real time of all its rounds, training, merging and judging, however often it was
        interrupted.
        """
        return sum(row.seconds for row in self.rows)


@dataclass(frozen=True)
class Job:
    """One arm with one seed, to be run unless it is complete."""

    experiment: Experiment
    scale: Scale
    arm: Arm
    config: SimulationConfig

    @property
    def complete(self) -> bool:
        """Whether it was run to its end.

        One that was run with fewer rounds, and is to go on, was not.

        Raises:
            ConfigError: its folder holds another configuration.
        """
        record = _read(self.config.out)
        if record is None or _is_shorter(record.config, self.config):
            return False
        if _identity(record.config) != _identity(self.config):
            raise ConfigError(
                f"{self.config.out} holds results of another configuration of "
                f"{self.experiment.table}, arm {self.arm.name}; name another --out, or remove that "
                "folder"
            )
        return True


@dataclass(frozen=True)
class Part:
    """What of a table is to be run; what is empty is as the scale has it."""

    seeds: tuple[int, ...] = ()
    arms: tuple[str, ...] = ()


def table_folder(out: Path, experiment: Experiment, scale: Scale) -> Path:
    """Where a table and its runs lie."""
    return out / experiment.table / scale


def jobs(
    experiment: Experiment,
    scale: Scale,
    out: Path,
    part: Part | None = None,
    *,
    engine: EngineTable | None = None,
) -> tuple[Job, ...]:
    """What is to be run for a table, or for a part of it, with results below an absolute folder.

    Returns:
        One job for each arm and seed, seed by seed, so that a table that is cut short has all arms
        of its first seeds.

    Raises:
        ConfigError: an arm is unknown, or a seed is named twice.
    """
    wanted = part or Part()
    chosen = wanted.seeds or experiment.seeds[scale]
    if len(set(chosen)) != len(chosen):
        raise ConfigError(f"--seeds: {', '.join(map(str, chosen))} names a seed twice")
    folder = table_folder(out, experiment, scale)
    run: dict[str, Any] = {
        "cache": folder / "cache",
        "keep_versions": _KEPT_VERSIONS,
        "engine": engine or EngineTable(),
    }
    return tuple(
        Job(
            experiment,
            scale,
            arm,
            arm.config(scale, seed, out=folder / arm.folder / f"seed-{seed}", **run),
        )
        for seed in chosen
        for arm in experiment.chosen(scale, wanted.arms)
    )


def run_job(
    job: Job,
    *,
    listener: Callable[[control.RunEvent], None] | None = None,
    stage: Callable[[str], None] = lambda _text: None,
    watch: Watch = lambda _row: None,
) -> None:
    """Run a job, or go on with it; does nothing if it is complete.

    Callbacks are as of `simulation.runner.simulate`.

    Raises:
        StoppedError: it was interrupted.
        ShoalError: it cannot be run.
    """
    from simulation.runner import simulate  # noqa: PLC0415 - loads PyTorch

    if job.complete or _shared(job):
        return
    result = simulate(job.config, listener=listener, stage=stage, watch=watch)
    name = f"{job.experiment.table}, arm {job.arm.name}, seed {job.config.seed}"
    if result.finished.status == "stopped":
        why = f" ({result.finished.error})" if result.finished.exit_code else ""
        raise StoppedError(f"{name} was stopped{why}; the same command goes on with it")
    if result.finished.status != "finished":
        raise ShoalError(f"{name} failed: {result.finished.error}")
    record = _Record(
        table=job.experiment.table,
        scale=job.scale,
        arm=job.arm.name,
        config=job.config,
        versions=_versions(),
        machine=f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        stated=stated(job.experiment, job.scale),
    )
    write_atomically(job.config.out / _RESULT, record.model_dump_json(indent=1).encode())


def _shared(job: Job) -> bool:
    """Take the rounds of a complete run that trained the same, of whichever table.

    Whether there is one.
    """
    folder = job.config.out
    for path in (
        ()
        if folder.exists()
        else sorted(folder.parents[3].glob(f"*/{job.scale}/*/{folder.name}/{_RESULT}"))
    ):
        with contextlib.suppress(DataError):  # what is damaged is for those who ask for it
            record = _read(path.parent)
            if (
                record is None
                or record.trained
                or _identity(record.config, "clock") != _identity(job.config, "clock")
            ):
                continue
            if rows := rounds_with(job.config, path.parent, record.config):
                write_history(folder, rows)
                if (
                    record.config.clock == job.config.clock
                ):  # of another the seconds would be others
                    shutil.copytree(path.parent / DEVICES, folder / DEVICES, dirs_exist_ok=True)
                config = job.config.model_copy(update={"engine": record.config.engine})
                mine = {
                    "table": job.experiment.table,
                    "arm": job.arm.name,
                    "config": config,
                }
                mine["stated"] = stated(job.experiment, job.scale)
                taken = record.model_copy(
                    update={**mine, "trained": f"{record.table}, {record.arm}"}
                )
                write_atomically(folder / _RESULT, taken.model_dump_json(indent=1).encode())
                return True
    return False


def collect(experiment: Experiment, scale: Scale, out: Path) -> tuple[ArmResult, ...]:
    """Find every complete run of a table, whenever it was run.

    Returns:
        In the order of the table's arms, and of the seeds. Runs of arms that the table has no more,
        or whose configuration has changed since, are left out.

    Raises:
        DataError: a result is damaged.
    """
    found = []
    for arm in experiment.arms:
        folder = table_folder(out, experiment, scale) / arm.folder
        runs = [
            (path, record) for path in folder.glob("seed-*") if (record := _read(path)) is not None
        ]
        for path, record in sorted(runs, key=lambda run: run[1].config.seed):
            if _identity(record.config) == _identity(arm.config(scale, record.config.seed)):
                rows = read_history(path)
                of = (record.versions, record.machine, record.trained)
                widths = widths_in(record.config, path) if devices_choose(record.config) else {}
                found.append(ArmResult(arm, record.config, rows, *of, widths, record.stated))
    return tuple(found)


def _read(folder: Path) -> _Record | None:
    path = folder / _RESULT
    if not path.is_file():
        return None
    try:
        return _Record.model_validate_json(path.read_bytes(), context=STORED)
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read {path}: {error}; remove the folder and run the arm again"
        ) from error


def _identity(config: SimulationConfig, *but: str) -> dict[str, Any]:
    return config.model_dump(mode="json", exclude={*HOW_COMPUTED, *but})


def _is_shorter(found: SimulationConfig, wanted: SimulationConfig) -> bool:
    """Whether two configurations differ in nothing but the rounds, of which the first has fewer."""
    longer = found.model_copy(
        update={"round": found.round.model_copy(update={"rounds": wanted.round.rounds})}
    )
    return found.round.rounds < wanted.round.rounds and _identity(longer) == _identity(wanted)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
