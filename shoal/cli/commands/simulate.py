"""Simulate a fleet: real rounds with virtual devices and emulated clocks.

Run the command again with the same configuration to resume a simulation that was stopped. If you
increase the number of rounds, the command runs the additional rounds.

Example: shoal simulate --rounds 50
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from shoal.cli.common import SIMULATION_FILE, AsJson, NewName
from shoal.cli.console import error_console, print_json, print_text, seconds_text
from shoal.cli.grouped import grouped
from shoal.extras import needs

if TYPE_CHECKING:
    from simulation.results.rounds import RoundRow
    from simulation.settings import SimulationConfig


@dataclass(frozen=True)
class _Options:
    config: Annotated[Path, typer.Option(help="The simulation's configuration.")] = SIMULATION_FILE
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the results; overrides the configuration."),
    ] = None
    name: NewName = None
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Number of rounds; overrides the configuration.")
    ] = None
    seed: Annotated[int | None, typer.Option(min=0, help="Seed; overrides the configuration.")] = (
        None
    )
    workers: Annotated[
        int | None, typer.Option(min=0, help="Number of processes or actors; 0 for one per core.")
    ] = None
    as_json: AsJson = False


@grouped(_Options)
def _simulate(options: _Options) -> None:
    with needs("simulate"):
        from shoal.cli.simulating import SimulationDisplay, print_rounds
        from simulation.results.plots import plot_run
        from simulation.runner import simulate

    config = _configured(options)
    console = error_console()

    def watch(row: "RoundRow") -> None:
        display.closed(row.round, _line(row))

    title = config.run_name or config.strategy.name
    with SimulationDisplay(console, config.round.rounds) as display:
        result = simulate(config, listener=display.show, stage=display.stage, watch=watch)
    # A simulation that ended before its first round has nothing to plot.
    plots = plot_run(result.folder, result.rounds, title=title) if result.rounds else ()
    if options.as_json:
        print_json([row.__dict__ | {"tiers": dict(row.tiers)} for row in result.rounds])
    else:
        print_rounds(result.rounds, title)
        for path in (result.folder / "metrics.parquet", *plots) if result.rounds else ():
            print_text(str(path))
    if result.finished.early:
        console.print(f"the simulation ended early: {result.finished.early}", highlight=False)
    if result.finished.status != "finished":
        line = f"the simulation {result.finished.status}: {result.finished.error}"
        console.print(f"[yellow]{escape(line)}[/]", soft_wrap=True, highlight=False)
        raise typer.Exit(result.finished.exit_code or 130)


def _configured(options: _Options) -> "SimulationConfig":
    from fleet_protocol.configuration import load_config
    from fleet_protocol.own_code import require_own_code
    from simulation.settings import SimulationConfig

    config = load_config(options.config, SimulationConfig).resolved(options.config.resolve().parent)
    # Before any work, because functions that the file names are code that this command would run.
    require_own_code(config.strategy, options.config, None)
    changes = {
        "out": options.out and options.out.resolve(),
        "run_name": options.name,
        "seed": options.seed,
        # An option that was not typed gives None, which is dropped below.
        "round": options.rounds and config.round.model_copy(update={"rounds": options.rounds}),
        "engine": None
        if options.workers is None
        # Zero workers means one for each core, so only None leaves the configured number.
        else config.engine.model_copy(update={"workers": options.workers}),
    }
    return config.model_copy(
        update={key: value for key, value in changes.items() if value is not None}
    )


def _line(row: "RoundRow") -> str:
    accuracy = "" if row.loss is None else f"loss {row.loss:.4f}, "
    # Without an accuracy, as for a regression, the line shows the loss.
    accuracy = accuracy if row.accuracy is None else f"accuracy {row.accuracy:.4f}, "
    loss = "" if row.train_loss is None else f"training loss {row.train_loss:.4f}, "
    local = "" if row.local_accuracy is None else f"local accuracy {row.local_accuracy:.4f}, "
    metrics = ""
    for name, value in (row.metrics or {}).items():
        metrics += f"{name} {value:.4f}, "
    times = f"{seconds_text(row.simulated_total)} simulated, {seconds_text(row.seconds)} real"
    return f"round {row.round}: {accuracy}{metrics}{local}{loss}{row.devices} devices, {times}"
