"""Shows how a run stands."""

from functools import partial

from rich.markup import escape

from broker_server.store.queries import StatusView
from shoal.cli.console import bytes_text, output_console, say, seconds_text
from shoal.cli.views.view import View, without_field
from shoal.sources import Source


def _read(source: Source, run: str) -> StatusView:
    return source.status(run)


def _draw(view: StatusView) -> None:
    console = output_console()
    if view.run is None:
        console.print(f"no run yet; {view.online} of {view.devices} devices online")
        return
    accuracy = "not evaluated"
    if view.evaluation is not None:
        accuracy = view.evaluation.summary
    about = f"{escape(view.run.arch)}: {escape(view.run.status)}"
    console.print(f"run [bold]{escape(view.run.id)}[/] of {about}", highlight=False)
    _draw_desertion(view)
    if view.insecure:
        console.print(
            "  [bold red]insecure[/]: nothing is signed; whoever reaches the broker can run graphs "
            "on the boards"
        )
    if view.run.detail:
        say(f"  {view.run.detail}")
    repeated = f" ({view.repeated} taken by a rollback)" if view.repeated else ""
    say(f"  {view.closed} of {view.rounds} rounds closed{repeated}, {accuracy}")
    if view.epsilon is not None:
        say(f"  epsilon {view.epsilon:.4g} for the device that was asked most often")
    if view.round is not None:
        say(f"  round {view.round.number} is {view.round.state.value}")
    if view.seconds_left is not None:
        say(f"  about {seconds_text(view.seconds_left)} left, at the pace of the newest rounds")
    say(f"  {_online_text(view)}")
    wire = bytes_text(view.run.wire_bytes)
    payload = bytes_text(view.run.payload_bytes)
    say(f"  {wire} on the wire, {payload} payload")
    refusals = [f"{count} {reason}" for reason, count in view.refusals.items()]
    say(f"  refused: {', '.join(refusals) or 'nothing'}")


def _draw_desertion(view: StatusView) -> None:
    """Say that nothing works on a run that is not over, and how it continues."""
    console = output_console()
    if view.is_deserted and view.is_simulated:
        console.print(
            "  [bold red]no simulation[/]: none works on this store, so the run stands still. "
            "`shoal simulate` continues it"
        )
    elif view.is_deserted:
        console.print(
            "  [bold red]no server[/]: none works on this store, so the run stands still. "
            "`shoal up` or `shoal run` goes on with it"
        )


def _online_text(view: StatusView) -> str:
    """Return how many devices are connected; without a server that is not known."""
    if view.served is False:
        return f"{view.online} of {view.devices} devices were online when the server ended"
    return f"{view.online} of {view.devices} devices online"


STATUS = View(_read, _draw, partial(without_field, "runs"))
