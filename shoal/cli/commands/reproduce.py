"""Run a table of a paper, and write it with the published numbers beside ours.

Given again, the command goes on where it was stopped; arms that are complete are not run again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleet_protocol.errors import ConfigError
from shoal.cli.common import AsJson
from shoal.cli.console import error_console, output_console, print_json, print_rows, seconds_text
from shoal.cli.extras import needs
from shoal.cli.grouped import grouped

if TYPE_CHECKING:
    from reproduction.experiment import Experiment, Scale
    from reproduction.report import Written
    from reproduction.running import Job
    from simulation.results.history import RoundRow
    from simulation.tables import EngineTable

__all__ = ["app"]

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class _Options:
    table: Annotated[str, typer.Argument(help="Name of the table; --list shows them all.")] = ""
    scale: Annotated[str, typer.Option(help="smoke (minutes), small (under two hours) or paper.")] = "small"
    seeds: Annotated[str, typer.Option(help="Seeds, for example 1,2,3; by default those of the scale.")] = ""
    only: Annotated[str, typer.Option(help="Arms to run, separated by commas; by default those of the scale.")] = ""
    out: Annotated[Path, typer.Option(help="Folder of all results.")] = Path("results")
    engine: Annotated[str, typer.Option(help="local or ray.")] = "local"
    address: Annotated[str | None, typer.Option(help="Address of a running Ray cluster.")] = None
    workers: Annotated[int, typer.Option(min=0, help="Processes or actors; 0 for one per core.")] = 0
    backend: Annotated[str, typer.Option(help="onnx or torch.")] = "onnx"
    device: Annotated[str, typer.Option(help="Of the torch backend: cpu or cuda.")] = "cpu"
    group: Annotated[int, typer.Option(min=1, help="Devices that the torch backend trains together.")] = 1
    listing: Annotated[bool, typer.Option("--list", help="List tables, or the arms of a table.")] = False
    as_json: AsJson = False


@app.command(help=__doc__)
@grouped(_Options)
def _reproduce(options: _Options) -> None:
    with needs("simulate"):
        from reproduction.catalogue import TABLES, find_experiment, parse_scale
        from reproduction.running import Part, jobs

    from shoal.cli.options import parse_ints

    if not options.table:
        if not options.listing:
            raise ConfigError(f"shoal reproduce: name a table; there are {', '.join(TABLES)}")
        _list_tables(tuple(TABLES.values()), as_json=options.as_json)
        return
    experiment, scale = find_experiment(options.table), parse_scale(options.scale)
    if options.listing:
        _list_arms(experiment, as_json=options.as_json)
        return
    folder = options.out.resolve()
    todo = jobs(
        experiment,
        scale,
        folder,
        Part(
            seeds=parse_ints("--seeds", options.seeds) if options.seeds else (),
            arms=tuple(name.strip() for name in options.only.split(",")) if options.only else (),
        ),
        engine=_engine(options),
    )
    complete = [job for job in todo if job.complete]  # also refuses folders of other configurations, before any work
    for number, job in enumerate(todo, 1):
        if job in complete:
            continue
        error_console().print(
            f"[bold]{experiment.table}[/] {scale}, {number} of {len(todo)}: {job.arm.name}, seed {job.config.seed}",
            highlight=False,
        )
        _run(job)
        _write(experiment, scale, folder)  # so that whatever stops the rest, the table has what is complete
    _report(experiment, scale, folder, as_json=options.as_json)


def _report(experiment: Experiment, scale: Scale, folder: Path, *, as_json: bool) -> None:
    from reproduction.figures import figures
    from reproduction.report import figure_cells, plain
    from reproduction.running import collect

    written = _write(experiment, scale, folder)
    results = collect(experiment, scale, folder)
    if as_json:
        print_json({**plain(experiment, scale, results), "files": list(map(str, written.paths))})
        return
    ran = len({result.arm.name for result in results})
    print_rows(
        f"{experiment.title}: {ran} of {len(experiment.arms)} arms run",
        [figure_cells(figure) for figure in figures(results)],
        empty="no arm is complete",
    )
    for path in written.paths:
        output_console().print(f"{path}", highlight=False, soft_wrap=True)


def _engine(options: _Options) -> EngineTable:
    from pydantic import ValidationError

    from simulation.tables import EngineTable

    names = ("address", "workers", "backend", "device", "group")
    try:
        return EngineTable.model_validate({"kind": options.engine, **{name: getattr(options, name) for name in names}})
    except ValidationError as error:
        # What the table of sim.toml calls `kind` is --engine here.
        problems = [(str(item["loc"][0]) if item["loc"] else "", item["msg"]) for item in error.errors()]
        words = "; ".join(f"--{'engine' if key == 'kind' else key or 'backend'}: {text}" for key, text in problems)
        raise ConfigError(f"shoal reproduce: {words}") from error


def _run(job: Job) -> None:
    from reproduction.running import run_job
    from shoal.cli.simulating import SimulationDisplay

    console = error_console()
    display = SimulationDisplay(console, job.config.round.rounds)

    def watch(row: RoundRow) -> None:
        accuracy = "" if row.accuracy is None else f"accuracy {row.accuracy:.4f}, "
        display.closed(row.round, f"round {row.round}: {accuracy}{seconds_text(row.seconds)}")

    if console.is_terminal:
        with display.live:
            run_job(job, listener=display.show, stage=display.stage, watch=watch)
    else:
        run_job(job, listener=display.show, stage=display.stage, watch=watch)


def _write(experiment: Experiment, scale: Scale, folder: Path) -> Written:
    from reproduction.report import write_table
    from reproduction.running import collect, table_folder

    return write_table(experiment, scale, collect(experiment, scale, folder), table_folder(folder, experiment, scale))


def _list_tables(experiments: tuple[Experiment, ...], *, as_json: bool) -> None:
    if as_json:
        print_json([{"table": e.table, "title": e.title, "arms": [arm.name for arm in e.arms]} for e in experiments])
        return
    print_rows(
        "tables",
        [
            {
                "table": e.table,
                "title": e.title,
                "arms": str(len(e.arms)),
                "small": f"{len(e.chosen('small'))} arms, {len(e.seeds['small'])} seeds",
            }
            for e in experiments
        ],
        empty="there are no tables",
    )


def _list_arms(experiment: Experiment, *, as_json: bool) -> None:
    chosen = {scale: {arm.name for arm in experiment.chosen(scale)} for scale in experiment.seeds}
    rows = [
        {
            "arm": arm.name,
            "what it is": arm.about,
            "published": ", ".join(f"{name} {figure.value:g}" for name, figure in arm.published.items()) or "-",
            "run by default at": ", ".join(scale for scale, names in chosen.items() if arm.name in names),
        }
        for arm in experiment.arms
    ]
    if as_json:
        print_json(rows)
    else:
        print_rows(experiment.title, rows, empty="no arms")
