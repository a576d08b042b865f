"""Draws progress: the events of a run, the stages of an export."""

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
    """Draw the progress of an export; yields the function that receives its stages.

    Without a terminal, nothing is drawn.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    # In a file it would leave an empty line before an error.
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
    """Progress bars that are redrawn while something runs, if the console is a terminal."""

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

    Without a terminal, it prints lines instead: for closed rounds, and for devices that connect and
    disconnect while too few are online.
    """

    def __init__(self, console: Console, title: str) -> None:
        super().__init__(console)
        # It has the name of the run, which a person chose.
        self._title = escape(title)
        self._devices: dict[str, tuple[str, str]] = {}
        self._waiting = ""
        self._last = ""
        self._rounds: TaskID = self._bars.add_task(self._title, total=None)
        self._live.update(self._render())

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for device, (tier, state) in sorted(self._devices.items()):
            table.add_row(f"  {escape(device)}", f"[dim]{escape(tier)}[/]", state)
        lines = [line for line in (self._waiting, self._last) if line]
        return Group(self._bars, table, *lines)

    def _set_state(self, device: str, state: str, tier: str | None = None) -> None:
        """Show a new state of a device; without a tier, it keeps its last one."""
        last_tier, _ = self._devices.get(device, ("", ""))
        self._devices[device] = (last_tier if tier is None else tier, state)

    def show(self, event: control.RunEvent) -> None:
        """Draw the view after an event."""
        self._apply(event)
        self._live.update(self._render())

    def note(self, line: str) -> None:
        """Print a line that does not belong to an event of the run."""
        self._console.print(f"[yellow]{escape(line)}[/]", highlight=False, soft_wrap=True)

    def _apply(self, event: control.RunEvent) -> None:
        """Update the view of the run, and then of its devices."""
        match event:
            case control.RunStarted():
                self._bars.update(self._rounds, total=event.rounds, completed=event.closed)
            case control.FleetChanged():
                self._show_waiting(event)
            # A round ends the wait for devices.
            case control.RoundStarted():
                self._waiting = ""
                # The devices of the last round leave the view.
                self._devices = {device: (tier, "asked") for device, tier in event.devices.items()}
            case control.RoundClosed():
                self._closed(event)
            case control.RoundJudged():
                result = event.note if event.evaluation is None else event.evaluation.summary
                self._show_last(f"  round {event.round} evaluated: {result}")
            case control.RoundAbandoned():
                self._console.print(
                    f"[yellow]round {event.round} abandoned:[/] {escape(event.reason)}"
                )
            case control.RunFinished() | control.RunRejected():
                self._devices = {}
            case _:
                self._apply_to_devices(event)

    def _apply_to_devices(self, event: control.RunEvent) -> None:
        """Update the view of the devices that an event concerns."""
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
                # Names and details come from devices, so a [word] in them must not count as markup.
                about = f"({event.reason.value}) {event.device or ''}: {event.detail}"
                self._console.print(f"[yellow]refused[/] {escape(about)}")
            case control.StatisticsStarted():
                for device in event.devices:
                    self._set_state(device, "statistics requested")

    def _show_waiting(self, event: control.FleetChanged) -> None:
        """Show how many devices are missing."""
        ready = f"{event.eligible} of {event.needed} ready"
        self._waiting = f"waiting for devices: {ready}, {len(event.online)} online"
        if not self._console.is_terminal:
            # Without a terminal the bars are not drawn, so print the state instead.
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
        """Show the last event; without a terminal, print it as a line."""
        # The summary has names of devices and metrics, which must not count as markup.
        self._last = escape(last)
        if not self._console.is_terminal:
            self._console.print(f"{self._title}{self._last}", highlight=False)
