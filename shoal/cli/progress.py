"""Draws what goes on as it comes: the events of a run, the stages of an export."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from typing_extensions import Self

from fleet_protocol import control
from shoal.cli.console import bytes_text

if TYPE_CHECKING:
    from trainer_export.progress import Progress as Stage

_BUSY = {"train": "training", "statistics": "statistics"}


@contextmanager
def export_bar(console: Console, title: str) -> "Iterator[Callable[[Stage], None]]":
    """Draw how far an export is; yields the function that receives its stages.

    Nothing is drawn where the console is no terminal.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    # Drawn to a file it would leave an empty line before an error.
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        shown = bar.add_task(title, total=None)

        def show(state: "Stage") -> None:
            bar.update(
                shown,
                description=f"{state.tier}: {state.stage}",
                completed=state.done,
                total=state.total,
            )

        yield show


class Display:
    """Bars that are drawn anew while something runs, where the console is a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._bars = Progress(*columns, console=console)
        self._live = Live(self._bars, console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()


class RunDisplay(Display):
    """A live view of one run; give every event to :meth:`show`.

    Where the console is no terminal, lines are printed instead: of closed rounds, and of devices
    that come and go while there are too few.
    """

    def __init__(self, console: Console, title: str) -> None:
        super().__init__(console)
        self._title = title
        self._devices: dict[str, tuple[str, str]] = {}
        self._waiting = ""
        self._last = ""
        self._rounds: TaskID = self._bars.add_task(title, total=None)
        self._live.update(self._render())

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for device, (tier, state) in sorted(self._devices.items()):
            table.add_row(f"  {device}", f"[dim]{tier}[/]", state)
        lines = [line for line in (self._waiting, self._last) if line]
        return Group(self._bars, table, *lines)

    def _set_state(self, device: str, state: str, tier: str | None = None) -> None:
        """Show another state of a device, with the tier that it had, if no other is given."""
        last_tier, _ = self._devices.get(device, ("", ""))
        self._devices[device] = (last_tier if tier is None else tier, state)

    def show(self, event: control.RunEvent) -> None:
        """Draw the view as it is after an event."""
        self._apply(event)
        self._live.update(self._render())

    def _apply(self, event: control.RunEvent) -> None:
        """Change what is shown of the run, and then of its devices."""
        match event:
            case control.RunStarted():
                self._bars.update(self._rounds, total=event.rounds, completed=event.closed)
            case control.FleetChanged():
                self._show_waiting(event)
            case control.RoundStarted():
                self._waiting = ""
                self._devices = {device: (tier, "asked") for device, tier in event.devices.items()}
            case control.RoundClosed():
                self._closed(event)
            case control.RoundJudged():
                result = event.note if event.evaluation is None else event.evaluation.summary
                self._show_last(f"  round {event.round} judged: {result}")
            case control.RoundAbandoned():
                self._console.print(
                    f"[yellow]round {event.round} abandoned:[/] {escape(event.reason)}"
                )
            case control.RunFinished() | control.RunRejected():
                self._devices = {}
            case _:
                self._apply_to_devices(event)

    def _apply_to_devices(self, event: control.RunEvent) -> None:
        """Change what is shown of the devices that an event concerns."""
        match event:
            case control.DeviceAccepted():
                self._set_state(event.device, _BUSY[event.kind], event.tier)
            case control.DeviceProgressed():
                loss = "" if event.loss is None else f", loss {event.loss:.4f}"
                progress = f"training, epoch {event.epoch}/{event.epochs}{loss}"
                self._set_state(event.device, progress)
            case control.UpdateReceived():
                self._set_state(event.device, f"[green]sent {bytes_text(event.size)}[/]")
            case control.UpdateRefused():
                # The detail comes from a device: a [word] in it is no markup.
                about = f"({event.reason.value}) {event.device or ''}"
                self._console.print(f"[yellow]refused[/] {about}: {escape(event.detail)}")
            case control.StatisticsStarted():
                for device in event.devices:
                    self._set_state(device, "asked for statistics")

    def _show_waiting(self, event: control.FleetChanged) -> None:
        """Show how many devices are missing."""
        ready = f"{event.eligible} of {event.needed} ready"
        self._waiting = f"waiting for devices: {ready}, {len(event.online)} online"
        if not self._console.is_terminal:
            self._console.print(self._waiting)

    def _closed(self, event: control.RoundClosed) -> None:
        self._bars.advance(self._rounds)
        accuracy = "" if event.evaluation is None else f"{event.evaluation.summary}, "
        missing = f", missing {', '.join(event.missing)}" if event.missing else ""
        self._show_last(
            f"  round {event.round}: {accuracy}{len(event.merged)} updates merged{missing}, "
            f"{event.round_seconds:.1f} s, {bytes_text(event.wire_bytes)} on the wire so far"
        )

    def _show_last(self, last: str) -> None:
        """Show the last thing that happened, as a line where the console is no terminal."""
        self._last = escape(last)
        if not self._console.is_terminal:
            self._console.print(f"{self._title}{self._last}", highlight=False)
