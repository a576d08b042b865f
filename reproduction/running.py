"""Run the arms of an experiment one after the other, and collect what was run before.

    <out>/<table>/<scale>/<arm>/seed-<n>/    the folder of one simulation
    <out>/<table>/<scale>/cache/             exported models and prepared data, shared by the arms

An arm that was stopped continues where it was, and so does one whose table asks for more rounds
than it had. An arm that is complete is not run again, nor is one that another arm of any table has
trained. Complete runs are in the table.
"""

import contextlib
import os
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleet_protocol import control
from fleet_protocol.errors import ConfigError, DataError, ShoalError
from reproduction.experiment import Arm, Experiment, Scale, stated
from reproduction.retiming import Widths, devices_choose, rounds_with, widths_in
from reproduction.run_record import (
    RESULT,
    RunRecord,
    identity,
    installed_versions,
    is_shorter,
    read_record,
)
from simulation.results.history import DEVICES, RoundRow, read_history, write_history
from simulation.settings import SimulationConfig
from simulation.tables import EngineTable

_KEPT_VERSIONS = 2  # older ones have no use, and a table's runs together would fill a disk

Watch = Callable[[RoundRow], None]


class StoppedError(ShoalError):
    """A run was interrupted; the same command goes on with it."""

    exit_code = 130


@dataclass(frozen=True)
class ArmResult:
    """A complete run of an arm with one seed.

    Attributes:
        trained: table and arm that it was trained for, if not for its own.
        widths: that every device trained in every round, where the devices choose them.
        stated: digest of what the table stated when it ended; empty where that was not kept.
    """

    arm: Arm
    config: SimulationConfig
    rows: tuple[RoundRow, ...]
    versions: Mapping[str, str]
    machine: str
    trained: str = ""
    widths: Mapping[int, Widths] = field(default_factory=dict)
    stated: str = ""

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self.config.seed

    @property
    def seconds(self) -> float:
        """Real time of training, merging and judging in all rounds, however often interrupted."""
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
        record = read_record(self.config.out)
        if record is None or is_shorter(record.config, self.config):
            return False
        if identity(record.config) != identity(self.config):
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


def table_folder(
    out: Path,
    experiment: Experiment,
    scale: Scale,
) -> Path:
    """Return the folder of a table and its runs."""
    return out / experiment.table / scale


def jobs(
    experiment: Experiment,
    scale: Scale,
    out: Path,
    part: Part | None = None,
    *,
    engine: EngineTable | None = None,
) -> tuple[Job, ...]:
    """Return what is to be run for a table, or for a part of it.

    Args:
        experiment: the table.
        scale: of its arms.
        out: the absolute folder that results lie below.
        part: None for all that the scale has.
        engine: what computes the runs; None for the default.

    Returns:
        One job for each arm and seed, seed by seed, so that a table that is cut short has all arms
        of its first seeds.

    Raises:
        ConfigError: an arm is unknown, or a seed is named twice.
    """
    wanted = part or Part()
    seeds = wanted.seeds or experiment.seeds[scale]
    if len(seeds) > len(set(seeds)):
        raise ConfigError(f"--seeds: {', '.join(map(str, seeds))} names a seed twice")
    folder = table_folder(out, experiment, scale)
    run: dict[str, Any] = {
        "cache": folder / "cache",
        "keep_versions": _KEPT_VERSIONS,
        "engine": engine or EngineTable(),
    }
    planned: list[Job] = []
    for seed in seeds:
        for arm in experiment.chosen(scale, wanted.arms):
            out_folder = folder / arm.folder / f"seed-{seed}"
            config = arm.config(scale, seed, out=out_folder, **run)
            planned.append(Job(experiment, scale, arm, config))
    return tuple(planned)


def run_job(
    job: Job,
    *,
    listener: Callable[[control.RunEvent], None] | None = None,
    stage: Callable[[str], None] = lambda _text: None,
    watch: Watch = lambda _row: None,
) -> None:
    """Run a job, or go on with it; do nothing if it is complete.

    Callbacks are as of `simulation.runner.simulate`.

    Raises:
        StoppedError: it was interrupted.
        ShoalError: it cannot be run.
    """
    from simulation.runner import simulate  # noqa: PLC0415 - loads PyTorch

    if job.complete or _reuse(job):
        return
    result = simulate(job.config, listener=listener, stage=stage, watch=watch)
    _require_finished(job, result.finished)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}"
    record = RunRecord(
        table=job.experiment.table,
        scale=job.scale,
        arm=job.arm.name,
        config=job.config,
        versions=installed_versions(),
        machine=machine,
        stated=stated(job.experiment, job.scale),
    )
    record.write(job.config.out)


def _require_finished(job: Job, finished: control.RunFinished) -> None:
    """Raise an error if a run did not come to its end."""
    name = f"{job.experiment.table}, arm {job.arm.name}, seed {job.config.seed}"
    if finished.status == "stopped":
        why = f" ({finished.error})" if finished.exit_code else ""
        raise StoppedError(f"{name} was stopped{why}; the same command goes on with it")
    if finished.status != "finished":
        raise ShoalError(f"{name} failed: {finished.error}")


def _reuse(job: Job) -> bool:
    """Use the rounds of a complete run of any table that trained the same; whether there is one."""
    folder = job.config.out
    if folder.exists():
        return False
    tables = folder.parents[3]
    for path in sorted(tables.glob(f"*/{job.scale}/*/{folder.name}/{RESULT}")):
        # A damaged result fails its own table alone.
        with contextlib.suppress(DataError):
            if _reuse_run(job, path.parent):
                return True
    return False


def _reuse_run(job: Job, source: Path) -> bool:
    """Use the rounds of the run in a folder if it trained the same; whether it did.

    Raises:
        DataError: its results are damaged.
    """
    record = read_record(source)
    # Rounds that were used again themselves are found at the run that trained them.
    if record is None or record.trained:
        return False
    if identity(record.config, "clock") != identity(job.config, "clock"):
        return False
    rows = rounds_with(job.config, source, record.config)
    if not rows:
        return False
    folder = job.config.out
    write_history(folder, rows)
    # With another clock the seconds of the devices would be wrong.
    if record.config.clock == job.config.clock:
        shutil.copytree(source / DEVICES, folder / DEVICES, dirs_exist_ok=True)
    changes = {
        "table": job.experiment.table,
        "arm": job.arm.name,
        "config": job.config.model_copy(update={"engine": record.config.engine}),
        "stated": stated(job.experiment, job.scale),
        "trained": f"{record.table}, {record.arm}",
    }
    record.model_copy(update=changes).write(folder)
    return True


def collect(
    experiment: Experiment,
    scale: Scale,
    out: Path,
) -> tuple[ArmResult, ...]:
    """Return every complete run of a table, whenever it was run.

    Returns:
        In the order of the table's arms, and of the seeds. Runs of arms that the table does not
        have any more, or whose configuration has changed since, are left out.

    Raises:
        DataError: a result is damaged.
    """
    results: list[ArmResult] = []
    for arm in experiment.arms:
        folder = table_folder(out, experiment, scale) / arm.folder
        for path, record in _complete_runs(folder):
            config_now = arm.config(scale, record.config.seed)
            if identity(record.config) == identity(config_now):
                results.append(_arm_result(arm, path, record))
    return tuple(results)


def _complete_runs(folder: Path) -> Sequence[tuple[Path, RunRecord]]:
    """Return the folders and records of an arm's complete runs, in the order of their seeds."""
    runs: list[tuple[Path, RunRecord]] = []
    for path in folder.glob("seed-*"):
        record = read_record(path)
        if record is not None:
            runs.append((path, record))
    return sorted(runs, key=lambda run: run[1].config.seed)


def _arm_result(
    arm: Arm,
    folder: Path,
    record: RunRecord,
) -> ArmResult:
    """Read the result of a complete run from its folder."""
    widths: Mapping[int, Widths] = {}
    if devices_choose(record.config):
        widths = widths_in(record.config, folder)
    return ArmResult(
        arm=arm,
        config=record.config,
        rows=read_history(folder),
        versions=record.versions,
        machine=record.machine,
        trained=record.trained,
        widths=widths,
        stated=record.stated,
    )
