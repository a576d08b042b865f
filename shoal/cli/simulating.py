"""Draws a simulation as it runs, and sums it up when it has ended."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fleet_protocol import control
from shoal.cli.console import bytes_text, output_console, seconds_text
from shoal.cli.progress import Display

if TYPE_CHECKING:
    from simulation.results.history import RoundRow


class SimulationDisplay(Display):
    """Two bars, rounds and the tasks of the round in progress, and the last round in words."""

    def __init__(self, console: Console, rounds: int) -> None:
        super().__init__(console)
        self._rounds = self._bars.add_task("rounds", total=rounds)
        self._tasks = self._bars.add_task("devices", total=None)

    def stage(self, text: str) -> None:
        """Show what is being prepared."""
        self._bars.update(self._tasks, description=text)
        if not self._console.is_terminal:
            self._console.print(text)

    def show(self, event: control.RunEvent) -> None:
        """Draw the bars as they are after an event of the run."""
        if isinstance(event, control.RoundStarted):
            self._bars.reset(
                self._tasks,
                total=len(event.devices),
                description=f"round {event.round}: training",
            )
        elif isinstance(event, control.StatisticsStarted):
            self._bars.reset(
                self._tasks,
                total=len(event.devices),
                description=f"round {event.round}: statistics",
            )
        elif isinstance(event, control.UpdateReceived):
            self._bars.advance(self._tasks)
        elif isinstance(event, control.UpdateRefused):
            about = f"{event.device}, round {event.round}: {event.reason.value}"
            self._say(f"[yellow]{about}: {escape(event.detail)}[/]")
        elif isinstance(event, control.RoundAbandoned):
            self._say(f"[yellow]round {event.round} was abandoned: {escape(event.reason)}[/]")

    def closed(self, number: int, text: str) -> None:
        """Show a closed round."""
        self._bars.update(self._rounds, completed=number)
        self._say(text)

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False)


def print_rounds(rows: "Sequence[RoundRow]", title: str) -> None:
    """Print a simulation in one line, nothing if no round was evaluated.

    Without an accuracy the loss is printed.
    """
    scores = [(row.accuracy, row.round) for row in rows if row.accuracy is not None]
    name = "accuracy"
    best_name = "highest"
    if not scores:
        scores = [(row.loss, row.round) for row in rows if row.loss is not None]
        name = "loss"
        best_name = "lowest"
    if not scores:
        return
    best, best_round = max(scores) if best_name == "highest" else min(scores)
    last, _ = scores[-1]
    columns = {
        "rounds": str(len(rows)),
        name: f"{last:.4f}",
        best_name: f"{best:.4f} (round {best_round})",
        "simulated": seconds_text(rows[-1].simulated_total),
        "real": seconds_text(sum(row.seconds for row in rows)),
        "payload": bytes_text(sum(row.payload_bytes for row in rows)),
    }
    if rows[-1].epsilon is not None:
        columns["epsilon"] = f"{rows[-1].epsilon:.4g}"
    table = Table(*columns, title=title)
    table.add_row(*columns.values())
    output_console().print(table)
