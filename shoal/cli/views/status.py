"""Shows the state of a run."""

from functools import partial

from rich.markup import escape

from broker_server.store.queries import StatusView
from shoal.cli.console import bytes_text, output_console, print_text, seconds_text
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
    # Names in a store may contain brackets, which would count as markup.
    about = f"{escape(view.run.arch)}: {escape(view.run.status)}"
    console.print(f"run [bold]{escape(view.run.shown)}[/] of {about}", highlight=False)
    _draw_desertion(view)
    if view.insecure:
        console.print(
            "  [bold red]insecure[/]: messages are not signed; anyone who reaches the broker can"
            " run graphs on the boards"
        )
    if view.run.detail:
        print_text(f"  {view.run.detail}")
    print_text(f"  {view.closed} of {view.rounds} rounds closed{_rollbacks(view)}, {accuracy}")
    if view.epsilon is not None:
        print_text(f"  epsilon {view.epsilon:.4g} for the device that was selected most often")
    if view.round is not None:
        print_text(f"  round {view.round.number} is {view.round.state.value}")
    if view.seconds_left is not None:
        print_text(
            f"  about {seconds_text(view.seconds_left)} left, based on the durations of the"
            " newest rounds"
        )
    print_text(f"  {_online_text(view)}")
    wire = bytes_text(view.run.wire_bytes)
    payload = bytes_text(view.run.payload_bytes)
    print_text(f"  {wire} on the wire, {payload} payload")
    refusals = [f"{count} {reason}" for reason, count in view.refusals.items()]
    print_text(f"  refused: {', '.join(refusals) or 'nothing'}")


def _rollbacks(view: StatusView) -> str:
    """Return how often the run was rolled back; each time adds a version that no round made."""
    if not view.repeated:
        return ""
    times = "once" if view.repeated == 1 else f"{view.repeated} times"
    return f" (rolled back {times})"


def _draw_desertion(view: StatusView) -> None:
    """Report that no process works on an unfinished run, and how to continue it."""
    console = output_console()
    # A store of a simulation never gets a server.
    if view.is_deserted and view.simulated:
        console.print(
            "  [bold red]no simulation[/] is using this store, so the run is stopped."
            " `shoal simulate` continues it"
        )
    elif view.is_deserted:
        console.print(
            "  [bold red]no server[/] is using this store, so the run is stopped. `shoal up` or"
            " `shoal run` continues it"
        )


def _online_text(view: StatusView) -> str:
    """Return the number of online devices; without a server, the last known number."""
    # None if the file system does not tell.
    if view.served is False:
        return f"{view.online} of {view.devices} devices were online when the server stopped"
    return f"{view.online} of {view.devices} devices online"


STATUS = View(_read, _draw, partial(without_field, "runs"))
