"""Draws a running simulation, and summarises it at its end."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fleet_protocol import control
from shoal.cli.console import bytes_text, output_console, seconds_text
from shoal.cli.progress import Display

if TYPE_CHECKING:
    from simulation.results.rounds import RoundRow


class SimulationDisplay(Display):
    """Two bars, for rounds and for tasks of the current round, and the last round as text."""

    def __init__(self, console: Console, rounds: int) -> None:
        super().__init__(console)
        self._rounds = self._bars.add_task("rounds", total=rounds)
        self._tasks = self._bars.add_task("devices", total=None)

    def stage(self, text: str) -> None:
        """Show the current step of the preparation."""
        self._bars.update(self._tasks, description=text)
        # Without a terminal the bars are not drawn.
        if not self._console.is_terminal:
            self._console.print(text)

    def show(self, event: control.RunEvent) -> None:
        """Draw the bars after an event of the run."""
        if isinstance(event, control.RoundStarted):
            # The number of devices changes from round to round, so each stage starts an empty bar.
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
            # The detail may contain a path or a device's text, which must not count as markup.
            self._print_line(f"[yellow]{about}: {escape(event.detail)}[/]")
        elif isinstance(event, control.RoundAbandoned):
            self._print_line(
                f"[yellow]round {event.round} was abandoned: {escape(event.reason)}[/]"
            )

    def closed(self, number: int, text: str) -> None:
        """Show a closed round."""
        self._bars.update(self._rounds, completed=number)
        self._print_line(text)

    def _print_line(self, text: str) -> None:
        self._console.print(text, highlight=False)


def print_rounds(rows: "Sequence[RoundRow]", title: str) -> None:
    """Print a simulation in one line; nothing if no round was evaluated.

    Without an accuracy, print the loss.
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
    # Among equal accuracies the latest round wins, among equal losses the earliest.
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
    # Only a run with noise spends privacy.
    if rows[-1].epsilon is not None:
        columns["epsilon"] = f"{rows[-1].epsilon:.4g}"
    table = Table(*columns, title=title)
    table.add_row(*columns.values())
    output_console().print(table)
