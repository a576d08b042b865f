"""Reproduce a table from a paper, and check the paper's claims against figures from this code.

If the command is interrupted, run it again to resume the table; completed arms are not repeated.

Example: shoal reproduce fedrolex-3 --scale small --out results
"""

import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleet_protocol.errors import ConfigError, DataError
from shoal.cli.common import AsJson
from shoal.cli.console import error_console, print_json, print_rows, print_text, seconds_text
from shoal.cli.grouped import grouped
from shoal.extras import needs

if TYPE_CHECKING:
    from reproduction.claim_result import ClaimResult
    from reproduction.experiment import Experiment, Scale
    from reproduction.report.writing import WrittenTable
    from reproduction.running import Job, TablePart
    from simulation.device_tables import EngineTable
    from simulation.results.rounds import RoundRow


@dataclass(frozen=True)
class _Options:
    table: Annotated[str, typer.Argument(help="Name of the table; --list shows all tables.")] = ""
    scale: Annotated[
        str,
        typer.Option(help="Scale: smoke (minutes), small (less than two hours per seed) or paper."),
    ] = "small"
    seeds: Annotated[
        str,
        typer.Option(help="Seeds, for example 1,2,3; by default, the seeds of the scale."),
    ] = ""
    only: Annotated[
        str,
        typer.Option(help="Arms to run, separated by commas; by default, the arms of the scale."),
    ] = ""
    out: Annotated[Path, typer.Option(help="Folder for all results.")] = Path("results")
    every: Annotated[bool, typer.Option("--all", help="Run all tables, the main tables first.")] = (
        False
    )
    budget: Annotated[
        str,
        typer.Option(
            help="Start only runs that are expected to end within this time, such as 90m or 8h."
        ),
    ] = ""
    report: Annotated[
        Path | None,
        typer.Option(
            help="Run nothing; write the completed results and their verdicts to this folder."
        ),
    ] = None
    engine: Annotated[str, typer.Option(help="Engine: local or ray.")] = "local"
    address: Annotated[str | None, typer.Option(help="Address of a running Ray cluster.")] = None
    workers: Annotated[
        int, typer.Option(min=0, help="Number of processes or actors; 0 for one per core.")
    ] = 0
    backend: Annotated[str, typer.Option(help="Backend: onnx or torch.")] = "onnx"
    device: Annotated[str, typer.Option(help="Device of the torch backend: cpu or cuda.")] = "cpu"
    group: Annotated[
        int, typer.Option(min=1, help="Number of devices that the torch backend trains together.")
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
    # Neither a table nor --all, or both.
    if bool(options.table) == options.every:
        raise ConfigError(
            f"shoal reproduce: name a table or give --all; the tables are {', '.join(TABLES)}"
        )
    selection = _part(options)
    ends_at = math.inf
    if options.budget:
        ends_at = time.monotonic() + parse_seconds("--budget", options.budget)
    ranked = sorted(experiments, key=lambda experiment: experiment.rank)
    # Check all tables first, so that folders of other configurations are refused before any work.
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
        # At the end, so that one run that cannot start does not stop the others.
        raise DataError(
            f"{left_out} runs are not complete, for the reasons above; the same command"
            " resumes them"
        )


def _part(options: _Options) -> "TablePart":
    """Return the requested seeds and arms; an empty tuple stands for those of the scale."""
    from reproduction.running import TablePart
    from shoal.cli.options import parse_ints

    seeds: tuple[int, ...] = ()
    if options.seeds:
        seeds = parse_ints("--seeds", options.seeds)
    arms: tuple[str, ...] = ()
    if options.only:
        arms = tuple(name.strip() for name in options.only.split(","))
    return TablePart(seeds=seeds, arms=arms)


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
    about = f"{title} (~ marks an estimate for {os.cpu_count()} cores)"
    print_rows(about, rows, empty="there are no tables")
    if options.table:
        claims = _claim_rows(experiments[0], scale, folder)
        print_rows("what the claims need", claims, empty="no claim is stored below --out")


def _run_all(jobs: "Sequence[Job]", ends_at: float, folder: Path) -> int:
    """Run the jobs that end in time, and return how many of them could not run or failed."""
    from reproduction.report.cells import duration_text
    from reproduction.run_costs import estimated_seconds, seconds_of_runs
    from reproduction.running import RunFailedError

    left_out = 0
    for number, job in enumerate(jobs, 1):
        table = f"{job.experiment.table} {job.scale}"
        name = f"{table}, {number} of {len(jobs)}: {job.arm.name}, seed {job.config.seed}"
        # Read again before each run, because the runs of this command add durations.
        estimated = estimated_seconds(job.experiment, job.scale)
        measured = seconds_of_runs(folder, job.experiment, job.scale)
        # Measured durations replace estimated ones.
        seconds = (estimated | measured).get(job.arm.name)
        # A run of unknown duration starts while any time is left.
        if ends_at - time.monotonic() < (seconds or 0.0):
            reason = "no time is left"
            if seconds is not None:
                reason = f"it takes {duration_text(seconds)}"
            error_console().print(f"skipped, because {reason}: {name}", highlight=False)
            # A run that the budget excludes is not a failure, so it does not count.
            continue
        error_console().print(f"[bold]{name}[/]", highlight=False)
        try:
            _run(job)
        except (ConfigError, DataError, RunFailedError) as error:
            # Data or a package is missing, another process runs the job, or its losses diverge.
            error_console().print(f"not complete: {error}", highlight=False, markup=False)
            left_out += 1
            continue
        # Write the table after each run, so that it is up to date if a later run fails.
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
        # Without the runs that it needs, a claim decides nothing.
        if result.claim.says and result.by_seed:
            claims.append(claim_cells(result))
    print_rows("verdicts", claims, empty="no claim has both of its arms")
    for published, here in stand_ins(experiment, arms_of(written.rows)):
        print_text(f"{here} replaces {published}: published figures and claims do not apply to it")
    for path in written.paths:
        print_text(str(path))
    return []


def _records(
    experiment: "Experiment", scale: "Scale", written: "WrittenTable"
) -> list[dict[str, Any]]:
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
            f"no run at the scale {scale} below {folder} is complete; give the --out and --scale"
            " of the runs"
        )
    print_text(str(write_index(report, TABLES)))


def _engine(options: _Options) -> "EngineTable":
    from fleet_protocol.configuration import validate_config
    from simulation.device_tables import EngineTable

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
) -> "WrittenTable | None":
    """Write a table, by default among its runs; None if no run of it is complete."""
    from reproduction.report.writing import write_table
    from reproduction.running import collect, table_folder

    results = collect(experiment, scale, folder)
    if not results:
        return None
    target = target or table_folder(folder, experiment, scale)
    return write_table(experiment, scale, results, target)


def _table_row(experiment: "Experiment", scale: "Scale", folder: Path) -> dict[str, str]:
    """Return the cells of a table in the list of all tables."""
    arms = [arm.name for arm in experiment.chosen(scale)]
    seeds = experiment.seeds[scale]
    return {
        "rank": str(experiment.rank),
        "table": experiment.table,
        "title": experiment.title,
        "runs": f"{len(arms)} of {len(experiment.arms)} arms, seeds {', '.join(map(str, seeds))}",
        "takes": _Durations(experiment, scale, folder).text(arms * len(seeds)),
        "claims": _verdict_counts(experiment, scale, folder),
    }


def _verdict_counts(experiment: "Experiment", scale: "Scale", folder: Path) -> str:
    """Return how many claims of a table have each verdict, as far as its runs are stored."""
    verdicts = Counter(result.verdict for result in _results(experiment, scale, folder))
    # Claims without a verdict have nothing to count.
    verdicts.pop("", None)
    return ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items())) or "-"


def _claim_rows(experiment: "Experiment", scale: "Scale", folder: Path) -> list[dict[str, str]]:
    """Return the cells of each claim of a table that was run: its verdict, and what it needs."""
    from reproduction.report.cells import claim_cells

    rows = []
    for result in _results(experiment, scale, folder):
        if result.claim.says and result.by_seed:
            cells = claim_cells(result)
            rows.append({name: cells[name] for name in ("claim", "verdict", "published", "needs")})
    return rows


def _results(experiment: "Experiment", scale: "Scale", folder: Path) -> "tuple[ClaimResult, ...]":
    """Judge the claims of a table by its figures in a folder of runs or of reports."""
    from reproduction.figures import judge
    from reproduction.running import table_folder
    from reproduction.stored import read_rows

    # The folder of runs first, since it is newer than any report of it.
    own = table_folder(folder, experiment, scale)
    # A report has its tables one folder above, without the scale in the path.
    for place in (own, own.parent):
        rows = read_rows(place / f"{experiment.table}.csv")
        if rows and rows[0].scale == scale:
            return judge(experiment, rows)
    return ()


def _arm_rows(experiment: "Experiment", scale: "Scale", folder: Path) -> list[dict[str, str]]:
    """Return the cells of each arm of a table."""
    durations = _Durations(experiment, scale, folder)
    arms_by_scale = {}
    for name in experiment.seeds:
        # A scale may leave arms out.
        arms_by_scale[name] = {arm.name for arm in experiment.chosen(name)}
    rows = []
    for arm in experiment.arms:
        published = [f"{name} {figure.value:g}" for name, figure in arm.published.items()]
        scales = [name for name, names in arms_by_scale.items() if arm.name in names]
        rows.append(
            {
                "arm": arm.name,
                "description": arm.about,
                "published": ", ".join(published) or "-",
                "default scales": ", ".join(scales),
                "time per run": durations.text([arm.name]),
            }
        )
    return rows


class _Durations:
    """Durations of the runs of a table's arms, measured or else estimated."""

    def __init__(self, experiment: "Experiment", scale: "Scale", folder: Path) -> None:
        from reproduction.run_costs import estimated_seconds, seconds_of_runs

        self._measured = seconds_of_runs(folder, experiment, scale)
        self._known = estimated_seconds(experiment, scale) | self._measured

    def text(self, runs: "Sequence[str]") -> str:
        """Return the total duration of runs of these arms as text."""
        from reproduction.report.cells import duration_text

        timed = [name for name in runs if name in self._known]
        if not timed:
            return duration_text(None)
        # One arm without a measurement makes the total an estimate.
        is_estimated = any(name not in self._measured for name in timed)
        prefix = "~" if is_estimated else "measured "
        unknown = ""
        if len(timed) < len(runs):
            # Arms, not runs: several seeds of an unknown arm count once.
            unknown = f", {len({*runs} - {*self._known})} unknown"
        return prefix + duration_text(sum(self._known[name] for name in timed)) + unknown
