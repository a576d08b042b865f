"""Run a table of a paper, and judge each of its claims by figures from this code.

The same command resumes a table that was stopped; it does not repeat complete arms.

Example: shoal reproduce fedrolex-3 --scale small --out results
"""

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleet_protocol.errors import ConfigError, DataError
from shoal.cli.common import AsJson
from shoal.cli.console import error_console, print_json, print_rows, say, seconds_text
from shoal.cli.grouped import grouped
from shoal.extras import needs

if TYPE_CHECKING:
    from reproduction.experiment import Experiment, Scale
    from reproduction.report.writing import Written
    from reproduction.running import Job, Part
    from simulation.results.history import RoundRow
    from simulation.tables import EngineTable


@dataclass(frozen=True)
class _Options:
    table: Annotated[str, typer.Argument(help="Name of the table; --list shows them all.")] = ""
    scale: Annotated[
        str,
        typer.Option(help="smoke (minutes), small (under two hours a seed) or paper."),
    ] = "small"
    seeds: Annotated[
        str,
        typer.Option(help="Seeds, for example 1,2,3; by default those of the scale."),
    ] = ""
    only: Annotated[
        str,
        typer.Option(help="Arms to run, separated by commas; by default those of the scale."),
    ] = ""
    out: Annotated[Path, typer.Option(help="Folder of all results.")] = Path("results")
    every: Annotated[
        bool, typer.Option("--all", help="Run all tables, the headline ones first.")
    ] = False
    budget: Annotated[
        str, typer.Option(help="Start no run that would not end within 90m or 8h.")
    ] = ""
    report: Annotated[
        Path | None,
        typer.Option(help="Only write what is complete, and its verdicts, there."),
    ] = None
    engine: Annotated[str, typer.Option(help="local or ray.")] = "local"
    address: Annotated[str | None, typer.Option(help="Address of a running Ray cluster.")] = None
    workers: Annotated[
        int, typer.Option(min=0, help="Processes or actors; 0 for one per core.")
    ] = 0
    backend: Annotated[str, typer.Option(help="onnx or torch.")] = "onnx"
    device: Annotated[str, typer.Option(help="Device of the torch backend: cpu or cuda.")] = "cpu"
    group: Annotated[
        int, typer.Option(min=1, help="Devices that the torch backend trains together.")
    ] = 1
    listing: Annotated[
        bool, typer.Option("--list", help="List tables, or the arms of a table.")
    ] = False
    as_json: AsJson = False


@grouped(_Options)
def _reproduce(options: _Options) -> None:
    with needs("simulate"):
        from reproduction.running import jobs
        from reproduction.table_file import TABLES, find_experiment, parse_scale

    from shoal.cli.options import parse_seconds

    scale = parse_scale(options.scale)
    folder = options.out.resolve()
    experiments = tuple(TABLES.values())
    if options.table:
        experiments = (find_experiment(options.table),)
    if options.listing:
        _list(options, experiments, scale, folder)
        return
    if options.report is not None:
        _publish(experiments, scale, folder, options.report)
        return
    if bool(options.table) == options.every:
        raise ConfigError(
            f"shoal reproduce: name a table, or give --all; there are {', '.join(TABLES)}"
        )
    selection = _part(options)
    ends_at = math.inf
    if options.budget:
        ends_at = time.monotonic() + parse_seconds("--budget", options.budget)
    ranked = sorted(experiments, key=lambda experiment: experiment.rank)
    # For all tables at first, so that folders of other configurations are refused before any work.
    jobs_by_table = {}
    for experiment in ranked:
        planned = jobs(experiment, scale, folder, selection, engine=_engine(options))
        jobs_by_table[experiment.table] = [job for job in planned if not job.complete]
    records = []
    left_out = 0
    for experiment in ranked:
        left_out += _run_all(jobs_by_table[experiment.table], ends_at, folder)
        records += _report(experiment, scale, folder, as_json=options.as_json)
    if options.as_json:
        print_json(records)
    if left_out:
        raise DataError(
            f"{left_out} left out of the runs, for what is said above; the same command goes on "
            "with them"
        )


def _part(options: _Options) -> "Part":
    """Return the seeds and arms that were asked for; none of either stands for those of a scale."""
    from reproduction.running import Part
    from shoal.cli.options import parse_ints

    seeds: tuple[int, ...] = ()
    if options.seeds:
        seeds = parse_ints("--seeds", options.seeds)
    arms: tuple[str, ...] = ()
    if options.only:
        arms = tuple(name.strip() for name in options.only.split(","))
    return Part(seeds=seeds, arms=arms)


def _list(
    options: _Options, experiments: "Sequence[Experiment]", scale: "Scale", folder: Path
) -> None:
    """Print the tables, or the arms of the one that was named."""
    if options.table:
        title = experiments[0].title
        rows = _arm_rows(experiments[0], scale, folder)
    else:
        title = f"tables at the scale {scale}"
        rows = [_table_row(experiment, scale, folder) for experiment in experiments]
    if options.as_json:
        print_json(rows)
        return
    about = f"{title} (~ is estimated for {os.cpu_count()} cores)"
    print_rows(about, rows, empty="there are no tables")


def _run_all(jobs: "Sequence[Job]", ends_at: float, folder: Path) -> int:
    """Run jobs that end in time, and return the number of those that could not run."""
    from reproduction.report.cells import duration_text
    from reproduction.stored import estimated_seconds, seconds_of_runs

    left_out = 0
    for number, job in enumerate(jobs, 1):
        table = f"{job.experiment.table} {job.scale}"
        name = f"{table}, {number} of {len(jobs)}: {job.arm.name}, seed {job.config.seed}"
        estimated = estimated_seconds(job.experiment, job.scale)
        measured = seconds_of_runs(folder, job.experiment, job.scale)
        seconds = (estimated | measured).get(job.arm.name)
        # A run of unknown duration is started as long as there is any time.
        if ends_at - time.monotonic() < (seconds or 0.0):
            error_console().print(
                f"left out, since it takes {duration_text(seconds)}: {name}", highlight=False
            )
            continue
        error_console().print(f"[bold]{name}[/]", highlight=False)
        try:
            _run(job)
        except (ConfigError, DataError) as error:
            # A data set or package is missing, or another process runs the job.
            error_console().print(f"left out: {error}", highlight=False, markup=False)
            left_out += 1
            continue
        # After each run, so that the table has what is complete if a later one fails.
        _write(job.experiment, job.scale, folder)
    return left_out


def _report(
    experiment: "Experiment", scale: "Scale", folder: Path, *, as_json: bool
) -> list[dict[str, Any]]:
    """Print a table, unless its values are to be printed as JSON."""
    from reproduction.figures import arms_of, figures, judge, stand_ins
    from reproduction.report.cells import claim_cells, figure_cells

    written = _write(experiment, scale, folder)
    if written is None:
        error_console().print(f"{experiment.table}: no arm is complete", highlight=False)
        return []
    if as_json:
        return _records(experiment, scale, written)
    rows = [figure_cells(figure) for figure in figures(experiment, written.rows)]
    print_rows(experiment.title, rows, empty="no figure was evaluated")
    claims = []
    for result in judge(experiment, written.rows):
        if result.claim.says and result.by_seed:
            claims.append(claim_cells(result))
    print_rows("verdicts", claims, empty="none of the claims has both of its arms")
    for published, here in stand_ins(experiment, arms_of(written.rows)):
        say(f"{here} stands for {published}: published figures and claims are not about it")
    for path in written.paths:
        say(str(path))
    return []


def _records(experiment: "Experiment", scale: "Scale", written: "Written") -> list[dict[str, Any]]:
    """Return the figures and claims of a table as records."""
    from reproduction.figures_json import to_json

    table = to_json(experiment, written.rows)
    about = {
        "table": experiment.table,
        "scale": scale,
        "files": list(map(str, written.paths)),
        "other_data": table["other_data"],
    }
    records = []
    for kind in ("figure", "claim"):
        for row in table[f"{kind}s"]:
            records.append({**about, "what": kind, **row})
    return records


def _publish(
    experiments: "Sequence[Experiment]", scale: "Scale", folder: Path, report: Path
) -> None:
    """Write the tables that have complete runs, and their index, to a folder."""
    from reproduction.report.writing import write_index
    from reproduction.table_file import TABLES

    written = []
    for experiment in experiments:
        written.append(_write(experiment, scale, folder, report / experiment.table))
    if not any(written):
        raise ConfigError(
            f"no run is complete at the scale {scale} below {folder}; say --out and --scale of the "
            "runs"
        )
    say(str(write_index(report, TABLES)))


def _engine(options: _Options) -> "EngineTable":
    from fleet_protocol.configuration import validate_config
    from simulation.tables import EngineTable

    table = {"kind": options.engine}
    for name in ("address", "workers", "backend", "device", "group"):
        table[name] = getattr(options, name)
    return validate_config(table, EngineTable, source="shoal reproduce (its --engine is kind)")


def _run(job: "Job") -> None:
    from reproduction.running import run_job
    from shoal.cli.simulating import SimulationDisplay

    def watch(row: "RoundRow") -> None:
        accuracy = ""
        if row.accuracy is not None:
            accuracy = f"accuracy {row.accuracy:.4f}, "
        display.closed(row.round, f"round {row.round}: {accuracy}{seconds_text(row.seconds)}")

    with SimulationDisplay(error_console(), job.config.round.rounds) as display:
        run_job(job, listener=display.show, stage=display.stage, watch=watch)


def _write(
    experiment: "Experiment", scale: "Scale", folder: Path, target: Path | None = None
) -> "Written | None":
    """Write a table, by default among its runs; None if no run of it is complete."""
    from reproduction.report.writing import write_table
    from reproduction.running import collect, table_folder

    results = collect(experiment, scale, folder)
    if not results:
        return None
    target = target or table_folder(folder, experiment, scale)
    return write_table(experiment, scale, results, target)


def _table_row(experiment: "Experiment", scale: "Scale", folder: Path) -> dict[str, str]:
    """Return the cells of a table in the list of all."""
    arms = [arm.name for arm in experiment.chosen(scale)]
    seeds = experiment.seeds[scale]
    return {
        "rank": str(experiment.rank),
        "table": experiment.table,
        "title": experiment.title,
        "runs": f"{len(arms)} of {len(experiment.arms)} arms, seeds {', '.join(map(str, seeds))}",
        "takes": _Durations(experiment, scale, folder).text(arms * len(seeds)),
    }


def _arm_rows(experiment: "Experiment", scale: "Scale", folder: Path) -> list[dict[str, str]]:
    """Return the cells of each arm of a table."""
    durations = _Durations(experiment, scale, folder)
    arms_by_scale = {}
    for name in experiment.seeds:
        arms_by_scale[name] = {arm.name for arm in experiment.chosen(name)}
    rows = []
    for arm in experiment.arms:
        published = [f"{name} {figure.value:g}" for name, figure in arm.published.items()]
        scales = [name for name, names in arms_by_scale.items() if arm.name in names]
        rows.append(
            {
                "arm": arm.name,
                "what it is": arm.about,
                "published": ", ".join(published) or "-",
                "run by default at": ", ".join(scales),
                "a run takes": durations.text([arm.name]),
            }
        )
    return rows


class _Durations:
    """How long runs of the arms of a table take, as measured, or else as estimated."""

    def __init__(self, experiment: "Experiment", scale: "Scale", folder: Path) -> None:
        from reproduction.stored import estimated_seconds, seconds_of_runs

        self._measured = seconds_of_runs(folder, experiment, scale)
        self._known = estimated_seconds(experiment, scale) | self._measured

    def text(self, runs: "Sequence[str]") -> str:
        """Return how long runs of arms take one after the other, for people."""
        from reproduction.report.cells import duration_text

        timed = [name for name in runs if name in self._known]
        if not timed:
            return duration_text(None)
        is_estimated = any(name not in self._measured for name in timed)
        prefix = "~" if is_estimated else "measured "
        unknown = ""
        if len(timed) < len(runs):
            unknown = f", {len({*runs} - {*self._known})} unknown"
        return prefix + duration_text(sum(self._known[name] for name in timed)) + unknown
