"""``shoal simulate``: many virtual devices on this machine or a Ray cluster, without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fleet_protocol import control
from fleet_protocol.config import load_config
from fleet_protocol.errors import ConfigError
from shoal_cli.console import bytes_text, error_console, output_console, print_json, seconds_text

__all__ = ["SimulationDisplay", "add_to"]


class SimulationDisplay:
    """Two bars, rounds and the tasks of the round in progress, and the last round in words.

    Where the console is no terminal, one line per closed round is printed instead.

    Args:
        console: where to draw.
        rounds: of the whole simulation.
    """

    def __init__(self, console: Console, rounds: int) -> None:
        self._console = console
        columns = (TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=console)
        self._rounds = self._bars.add_task("rounds", total=rounds)
        self._tasks = self._bars.add_task("devices", total=None)
        self.live = Live(self._bars, console=console, refresh_per_second=4, transient=True)

    def stage(self, text: str) -> None:
        """Show what is being prepared."""
        self._bars.update(self._tasks, description=text)
        if not self._console.is_terminal:
            self._console.print(text)

    def show(self, event: control.RunEvent) -> None:
        """Take in one event of the run."""
        if isinstance(event, control.RoundStarted):
            self._bars.reset(self._tasks, total=len(event.devices), description=f"round {event.round}: training")
        elif isinstance(event, control.StatisticsStarted):
            self._bars.reset(self._tasks, total=len(event.devices), description=f"round {event.round}: statistics")
        elif isinstance(event, control.UpdateReceived):
            self._bars.advance(self._tasks)
        elif isinstance(event, control.UpdateRefused):
            self._say(f"[yellow]{event.device}, round {event.round}: {event.reason.value}: {event.detail}[/]")
        elif isinstance(event, control.RoundAbandoned):
            self._say(f"[yellow]round {event.round} was abandoned: {event.reason}[/]")

    def closed(self, number: int, text: str) -> None:
        """Show a closed round."""
        self._bars.update(self._rounds, completed=number)
        self._say(text)

    def _say(self, text: str) -> None:
        (self.live.console if self._console.is_terminal else self._console).print(text, highlight=False)


def _simulate(
    config: Annotated[Path, typer.Option(help="The simulation's configuration, sim.toml.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the results, instead of the configured one.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Instead of the configured number.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Instead of the configured one.")] = None,
    workers: Annotated[int | None, typer.Option(min=0, help="Processes or actors; 0 for one per core.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rounds as JSON.")] = False,
) -> None:
    """Simulate a fleet: the planning, training and merging of real rounds, with emulated clocks.

    Started again with the same configuration it goes on where it was stopped; with more rounds it goes on, too.
    """
    try:
        from simulation.config import SimulationConfig  # noqa: PLC0415
        from simulation.history import RoundRow  # noqa: PLC0415
        from simulation.plots import plot_run  # noqa: PLC0415
        from simulation.runner import simulate  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"simulating needs the extras `simulate`, `server` and `export` ({error.name} is not installed)"
        ) from error

    chosen = load_config(config, SimulationConfig).relative_to(config.resolve().parent)
    chosen = chosen.model_copy(
        update={
            **({} if out is None else {"out": out.resolve()}),
            **({} if seed is None else {"seed": seed}),
            **({} if rounds is None else {"round": chosen.round.model_copy(update={"rounds": rounds})}),
            **({} if workers is None else {"engine": chosen.engine.model_copy(update={"workers": workers})}),
        }
    )
    display = SimulationDisplay(error_console(), chosen.round.rounds)

    def watch(row: RoundRow) -> None:
        accuracy = "" if row.accuracy is None else f"accuracy {row.accuracy:.4f}, "
        loss = "" if row.train_loss is None else f"training loss {row.train_loss:.4f}, "
        local = "" if row.local_accuracy is None else f"local accuracy {row.local_accuracy:.4f}, "
        display.closed(
            row.round,
            f"round {row.round}: {accuracy}{local}{loss}{row.devices} devices, "
            f"{seconds_text(row.simulated_total)} simulated, {seconds_text(row.seconds)} real",
        )

    if error_console().is_terminal:
        with display.live:
            result = simulate(chosen, listener=display.show, stage=display.stage, watch=watch)
    else:
        result = simulate(chosen, listener=display.show, stage=display.stage, watch=watch)
    plots = plot_run(result.folder, result.rounds, title=chosen.strategy.name) if result.rounds else ()
    if as_json:
        print_json([row.__dict__ | {"tiers": dict(row.tiers)} for row in result.rounds])
    else:
        _print(result.rounds, chosen.strategy.name)
        for path in (result.folder / "metrics.parquet", *plots):
            output_console().print(f"{path}", highlight=False, soft_wrap=True)
    if result.finished.status != "finished":
        error_console().print(f"[yellow]the simulation {result.finished.status}: {result.finished.error}[/]")
        raise typer.Exit(result.finished.exit_code or 130)


def _print(rows: tuple[object, ...], title: str) -> None:
    from simulation.history import RoundRow  # noqa: PLC0415

    found = [row for row in rows if isinstance(row, RoundRow)]
    judged = [row for row in found if row.accuracy is not None]
    if not found or not judged:
        return
    best = max(judged, key=lambda row: row.accuracy or 0.0)
    table = Table("rounds", "accuracy", "best", "simulated", "real", "payload", title=title)
    table.add_row(
        str(len(found)),
        f"{judged[-1].accuracy:.4f}",
        f"{best.accuracy:.4f} (round {best.round})",
        seconds_text(found[-1].simulated_total),
        seconds_text(sum(row.seconds for row in found)),
        bytes_text(sum(row.payload_bytes for row in found)),
    )
    output_console().print(table)


def add_to(app: typer.Typer) -> None:
    """Register the command.

    Args:
        app: the application.
    """
    app.command("simulate")(_simulate)
