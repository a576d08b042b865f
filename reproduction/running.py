"""Runs the arms of an experiment one after the other, and collects earlier runs.

    <out>/<table>/<scale>/<arm>/seed-<n>/    the folder of one simulation
    <out>/<table>/<scale>/cache/             exported models and prepared data, shared by the arms

A stopped arm resumes, and so does an arm whose table now has more rounds. A complete arm is not run
again; neither is an arm whose training another arm of any table has done. The table contains the
complete runs.
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
from reproduction.sizes import Sizes, mean_sizes
from simulation.device_tables import EngineTable
from simulation.results.history import DEVICES, read_history, write_history
from simulation.results.rounds import RoundRow
from simulation.settings import SimulationConfig

_KEPT_VERSIONS = 2  # older ones are not used, and would fill the disk

Watch = Callable[[RoundRow], None]


class RunFailedError(ShoalError):
    """A run began and could not end, for example because its losses are not finite."""


class StoppedError(ShoalError):
    """A run was interrupted; the same command resumes it."""

    # The code that shells use for a command that Ctrl-C ended: 128 + SIGINT.
    exit_code = 130


@dataclass(frozen=True)
class ArmResult:
    """A complete run of an arm with one seed.

    Attributes:
        trained: table and arm that it was trained for, if not for its own.
        widths: widths that every device trained in every round, if devices choose them.
        stated: digest of the table's statement when the run ended; empty if it was not recorded.
        sizes: sizes of the sub-models that devices trained; None if they were not recorded.
    """

    arm: Arm
    config: SimulationConfig
    rows: tuple[RoundRow, ...]
    versions: Mapping[str, str]
    machine: str
    trained: str = ""
    widths: Mapping[int, Widths] = field(default_factory=dict)
    stated: str = ""
    sizes: Sizes | None = None

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
    """A job: one arm with one seed, run unless it is complete."""

    experiment: Experiment
    scale: Scale
    arm: Arm
    config: SimulationConfig

    @property
    def complete(self) -> bool:
        """Return whether it is complete.

        A run with fewer rounds than configured is not complete.

        Raises:
            ConfigError: its folder has another configuration.
        """
        record = read_record(self.config.out)
        if record is None or is_shorter(record.config, self.config):
            return False
        if identity(record.config) != identity(self.config):
            raise ConfigError(
                f"{self.config.out} contains results of another configuration of"
                f" {self.experiment.table}, arm {self.arm.name}; use another --out, or remove"
                " that folder"
            )
        return True


@dataclass(frozen=True)
class TablePart:
    """The part of a table to run; empty fields use the scale's defaults."""

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
    part: TablePart | None = None,
    *,
    engine: EngineTable | None = None,
) -> tuple[Job, ...]:
    """Return the jobs of a table, or of a part of it.

    Args:
        experiment: the table.
        scale: scale of its arms.
        out: the absolute folder that contains the results.
        part: None for the scale's defaults.
        engine: what computes the runs; None for the default.

    Returns:
        One job for each arm and seed, ordered by seed, so that an interrupted table has all arms of
        its first seeds.

    Raises:
        ConfigError: an arm is unknown, or a seed is named twice.
    """
    wanted = part or TablePart()
    seeds = wanted.seeds or experiment.seeds[scale]
    if len(seeds) > len(set(seeds)):
        raise ConfigError(f"--seeds: {', '.join(map(str, seeds))} names a seed twice")
    folder = table_folder(out, experiment, scale)
    run: dict[str, Any] = {
        # Shared by all arms and seeds, because exports and data depend on neither.
        "cache": folder / "cache",
        "keep_versions": _KEPT_VERSIONS,
        "engine": engine or EngineTable(),
    }
    planned: list[Job] = []
    # Seeds outside, arms inside: after an interruption every arm has the first seeds, which can be
    # compared in pairs.
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
    """Run a job or resume it; do nothing if it is complete.

    The callbacks are those of `simulation.runner.simulate`.

    Raises:
        StoppedError: it was interrupted.
        RunFailedError: it began and failed.
        ShoalError: the job cannot run.
    """
    from simulation.runner import simulate  # noqa: PLC0415 - loads PyTorch

    # Completeness first: a changed configuration must be an error before anything is copied.
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
        sizes=mean_sizes(result.rounds, result.artifacts),
    )
    # Written last: only a folder of a complete run has this file, even after a kill.
    record.write(job.config.out)


def _require_finished(job: Job, finished: control.RunFinished) -> None:
    """Raise an error if a run did not complete."""
    name = f"{job.experiment.table}, arm {job.arm.name}, seed {job.config.seed}"
    if finished.status == "stopped":
        why = f" ({finished.error})" if finished.exit_code else ""
        raise StoppedError(f"{name} was stopped{why}; the same command resumes it")
    if finished.status != "finished":
        raise RunFailedError(f"{name} failed: {finished.error}")


def _reuse(job: Job) -> bool:
    """Reuse a complete run of any table with the same training; return whether there is one."""
    folder = job.config.out
    # A run that has begun resumes. With reused rounds, its folder would contain two runs.
    if folder.exists():
        return False
    # Above it are the folders of the arm, the scale, the table and all results.
    tables = folder.parents[3]
    # Sorted, so that the choice among several runs does not depend on the file system.
    for path in sorted(tables.glob(f"*/{job.scale}/*/{folder.name}/{RESULT}")):
        # A damaged result affects only its own table.
        with contextlib.suppress(DataError):
            if _reuse_run(job, path.parent):
                return True
    return False


def _reuse_run(job: Job, source: Path) -> bool:
    """Reuse the rounds of the run in a folder if its training is the same; return whether it is.

    Raises:
        DataError: its results are damaged.
    """
    record = read_record(source)
    # Reused rounds are found at the run that trained them.
    if record is None or record.trained:
        return False
    # The clock determines how long training takes, not its numbers, unless times affect the rounds:
    # `rounds_with` checks that.
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
        # The engine is the one that trained the run; the page of the table names it.
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
        In the order of the table's arms, and of the seeds. Runs of arms that the table no longer
        has, or whose configuration has changed, are dropped.

    Raises:
        DataError: a result is damaged.
    """
    results: list[ArmResult] = []
    for arm in experiment.arms:
        folder = table_folder(out, experiment, scale) / arm.folder
        for path, record in _complete_runs(folder):
            config_now = arm.config(scale, record.config.seed)
            # The folder of a changed arm may still contain the run of its earlier settings.
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
    # By number: by name, seed-10 would come before seed-2.
    return sorted(runs, key=lambda run: run[1].config.seed)


def _arm_result(
    arm: Arm,
    folder: Path,
    record: RunRecord,
) -> ArmResult:
    """Read the result of a complete run from its folder."""
    widths: Mapping[int, Widths] = {}
    # Without a choice, widths are those that the settings assign, and not worth a plot.
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
        sizes=record.sizes,
    )
