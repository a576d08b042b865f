"""Run a table of a paper, and write published figures beside ours with a verdict for each claim.

Given again, the command goes on where it was stopped; arms that are complete are not run again.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
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
    from reproduction.running import Job
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
    device: Annotated[str, typer.Option(help="Of the torch backend: cpu or cuda.")] = "cpu"
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
        from reproduction.running import Part, jobs
        from reproduction.table_file import TABLES, find_experiment, parse_scale

    from shoal.cli.options import parse_ints, parse_seconds

    scale = parse_scale(options.scale)
    folder = options.out.resolve()
    chosen = (find_experiment(options.table),) if options.table else tuple(TABLES.values())
    if options.listing:
        rows = (
            _arm_rows(chosen[0], scale, folder)
            if options.table
            else [_table_row(e, scale, folder) for e in chosen]
        )
        if options.as_json:
            print_json(rows)
        else:
            title = chosen[0].title if options.table else f"tables at the scale {scale}"
            print_rows(
                f"{title} (~ is estimated for {os.cpu_count()} cores)",
                rows,
                empty="there are no tables",
            )
        return
    if options.report is not None:
        _publish(chosen, scale, folder, options.report)
        return
    if bool(options.table) == options.every:
        raise ConfigError(
            f"shoal reproduce: name a table, or give --all; there are {', '.join(TABLES)}"
        )
    part = Part(
        seeds=parse_ints("--seeds", options.seeds) if options.seeds else (),
        arms=tuple(name.strip() for name in options.only.split(",")) if options.only else (),
    )
    ends_at = time.monotonic() + (
        parse_seconds("--budget", options.budget) if options.budget else math.inf
    )
    ranked = sorted(chosen, key=lambda experiment: experiment.rank)
    # Folders of other configurations are refused before any work.
    todo = {
        e.table: [
            j for j in jobs(e, scale, folder, part, engine=_engine(options)) if not j.complete
        ]
        for e in ranked
    }
    reports = []
    lacking = 0
    for experiment in ranked:
        lacking += _run_all(todo[experiment.table], ends_at, folder)
        reports.append(_report(experiment, scale, folder, as_json=options.as_json))
    if options.as_json:
        print_json([record for report in reports for record in report])
    if lacking:
        raise DataError(
            f"{lacking} left out of the runs, for what is said above; the same command goes on with them"
        )


def _run_all(todo: "Sequence[Job]", ends_at: float, folder: Path) -> int:
    from reproduction.report.cells import duration_text
    from reproduction.stored import estimated_seconds, seconds_of_runs

    lacking = 0
    for number, job in enumerate(todo, 1):
        name = f"{job.experiment.table} {job.scale}, {number} of {len(todo)}: {job.arm.name}, seed {job.config.seed}"
        estimated = estimated_seconds(job.experiment, job.scale)
        seconds = (estimated | seconds_of_runs(folder, job.experiment, job.scale)).get(job.arm.name)
        # What is unknown may take any time; it is started as long as there is some.
        if ends_at - time.monotonic() < (seconds or 0.0):
            error_console().print(
                f"left out, since it takes {duration_text(seconds)}: {name}",
                highlight=False,
            )
            continue
        error_console().print(f"[bold]{name}[/]", highlight=False)
        try:
            _run(job)
        except (
            ConfigError,
            DataError,
        ) as error:  # no data set or package, or at work elsewhere
            error_console().print(f"left out: {error}", highlight=False, markup=False)
            lacking += 1
            continue
        _write(
            job.experiment, job.scale, folder
        )  # so that whatever stops the rest, the table has what is complete
    return lacking


def _report(
    experiment: "Experiment", scale: "Scale", folder: Path, *, as_json: bool
) -> list[dict[str, Any]]:
    """Print a table, unless its values are to be printed as JSON."""
    from reproduction.figures import arms_of, figures, judged, plain, stand_ins
    from reproduction.report.cells import claim_cells, figure_cells

    written = _write(experiment, scale, folder)
    if written is None:
        error_console().print(f"{experiment.table}: no arm is complete", highlight=False)
        return []
    if as_json:
        table = plain(experiment, written.rows)
        of = {
            "table": experiment.table,
            "scale": scale,
            "files": list(map(str, written.paths)),
        }
        of["other_data"] = table["other_data"]
        return [
            {**of, "what": what, **row} for what in ("figure", "claim") for row in table[f"{what}s"]
        ]
    found = figures(experiment, written.rows)
    print_rows(
        experiment.title,
        [figure_cells(figure) for figure in found],
        empty="no figure was evaluated",
    )
    claims = [
        claim_cells(item)
        for item in judged(experiment, written.rows)
        if item.claim.says and item.by_seed
    ]
    print_rows("verdicts", claims, empty="none of the claims has both of its arms")
    for published, here in stand_ins(experiment, arms_of(written.rows)):
        say(f"{here} stands for {published}: published figures and claims are not about it")
    for path in written.paths:
        say(str(path))
    return []


def _publish(chosen: "Sequence[Experiment]", scale: "Scale", folder: Path, report: Path) -> None:
    from reproduction.report.writing import write_index
    from reproduction.table_file import TABLES

    if not [
        1 for experiment in chosen if _write(experiment, scale, folder, report / experiment.table)
    ]:
        raise ConfigError(
            f"no run is complete at the scale {scale} below {folder}; say --out and --scale of the runs"
        )
    say(str(write_index(report, TABLES)))


def _engine(options: _Options) -> "EngineTable":
    from fleet_protocol.configuration import validate_config
    from simulation.tables import EngineTable

    names = ("address", "workers", "backend", "device", "group")
    given = {"kind": options.engine, **{name: getattr(options, name) for name in names}}
    return validate_config(given, EngineTable, source="shoal reproduce (its --engine is kind)")


def _run(job: "Job") -> None:
    from reproduction.running import run_job
    from shoal.cli.simulating import SimulationDisplay

    def watch(row: "RoundRow") -> None:
        accuracy = "" if row.accuracy is None else f"accuracy {row.accuracy:.4f}, "
        display.closed(row.round, f"round {row.round}: {accuracy}{seconds_text(row.seconds)}")

    with SimulationDisplay(error_console(), job.config.round.rounds) as display:
        run_job(job, listener=display.show, stage=display.stage, watch=watch)


def _write(
    experiment: "Experiment", scale: "Scale", folder: Path, where: Path | None = None
) -> "Written | None":
    from reproduction.report.writing import write_table
    from reproduction.running import collect, table_folder

    results = collect(experiment, scale, folder)
    where = where or table_folder(folder, experiment, scale)
    return write_table(experiment, scale, results, where) if results else None


def _table_row(experiment: "Experiment", scale: "Scale", folder: Path) -> dict[str, str]:
    arms = experiment.chosen(scale)
    seeds = experiment.seeds[scale]
    return {
        "rank": str(experiment.rank),
        "table": experiment.table,
        "title": experiment.title,
        "runs": f"{len(arms)} of {len(experiment.arms)} arms, seeds {', '.join(map(str, seeds))}",
        "takes": _takes(experiment, scale, folder)([arm.name for arm in arms] * len(seeds)),
    }


def _arm_rows(experiment: "Experiment", scale: "Scale", folder: Path) -> list[dict[str, str]]:
    chosen = {each: {arm.name for arm in experiment.chosen(each)} for each in experiment.seeds}
    takes = _takes(experiment, scale, folder)
    return [
        {
            "arm": arm.name,
            "what it is": arm.about,
            "published": ", ".join(
                f"{name} {figure.value:g}" for name, figure in arm.published.items()
            )
            or "-",
            "run by default at": ", ".join(
                each for each, names in chosen.items() if arm.name in names
            ),
            "a run takes": takes([arm.name]),
        }
        for arm in experiment.arms
    ]


def _takes(
    experiment: "Experiment", scale: "Scale", folder: Path
) -> "Callable[[Sequence[str]], str]":
    """Tells how long runs of arms take one after the other: measured, or about where that of an arm
    is estimated.
    """
    from reproduction.report.cells import duration_text
    from reproduction.stored import estimated_seconds, seconds_of_runs

    measured = seconds_of_runs(folder, experiment, scale)
    known = estimated_seconds(experiment, scale) | measured

    def told(runs: "Sequence[str]") -> str:
        there = [known[name] for name in runs if name in known]
        about = (
            "~"
            if any(name in known and name not in measured for name in runs)
            else "measured "
            if there
            else ""
        )
        missing = f", {len({*runs} - {*known})} unknown" if there and len(there) < len(runs) else ""
        return about + duration_text(sum(there) if there else None) + missing

    return told
