"""Runs the server until it is stopped (``shoal up``) or for one run (``shoal run``)."""

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import typer
from rich.markup import escape

from broker_server.service.launch import predict, run_fleet, serve_fleet, steer
from broker_server.service.server import Server
from broker_server.service.visiting import ServerAccess
from broker_server.settings.broker import BrokerConfig
from broker_server.settings.fleet import FleetConfig, ViewConfig
from fleet_protocol import control
from fleet_protocol.configuration import load_config, validate_config
from fleet_protocol.data.samples import print_predictions, read_request
from fleet_protocol.own_code import require_own_code
from fleet_protocol.requests import Wanted, Wish
from shoal.cli.console import error_console, print_json, print_text
from shoal.cli.fleet_export import export_if_changed
from shoal.cli.local_boards import LocalBoards
from shoal.cli.progress import RunDisplay
from shoal.client import Client
from shoal.extras import needs
from shoal.sources import connect

INTERRUPTED = 130


def read_fleet(path: Path, broker: str | None) -> FleetConfig:
    """Read fleet.toml; its relative paths start at its folder.

    `broker` replaces the configured address.

    Raises:
        ConfigError: the file is missing or invalid, or names functions outside its own folder and
            the folders that it lists.
    """
    config = load_config(path, FleetConfig).resolved(path.resolve().parent)
    require_own_code(config, path, config.code)
    config = config.without_export()
    if broker is None:
        return config
    # Only the written keys: the defaults of the others may depend on the address.
    changed = {**config.broker.model_dump(exclude_unset=True), "url": broker}
    settings = validate_config(changed, BrokerConfig, source="--broker")
    return config.model_copy(update={"broker": settings})


def prepare_fleet(path: Path, broker: str | None) -> FleetConfig:
    """Read fleet.toml, and export its model if it has ``[model.export]`` and anything has changed.

    Raises the errors of `read_fleet` and `export_if_changed`.
    """
    # Refused before anything of it is run or read.
    settings = read_fleet(path, broker)
    export_if_changed(load_config(path, FleetConfig), path)
    return settings


def serve(
    fleet: str,
    store: Path,
    broker: BrokerConfig,
    own: FleetConfig | None = None,
    view: ViewConfig | None = None,
) -> None:
    """Accept requests until stopped, and draw the events; serve the page only with `view`.

    Over MQTT it accepts only runs of its `own` configuration. It raises a ShoalError if the server
    cannot continue.
    """
    console = error_console()
    display: list[RunDisplay] = []

    def show(event: control.RunEvent) -> None:
        if isinstance(event, control.RunStarted):
            display.append(RunDisplay(console, event.run))
            # The display lasts from one event to another, so no `with` can hold it.
            display[-1].__enter__()
        if display:
            display[-1].show(event)
        if isinstance(event, control.RunFinished) and display:
            display.pop().__exit__(None, None, None)
            console.print(escape(f"run {event.run} {event.status}{_why(event)}"))

    def ready(server: Server) -> None:
        console.print(
            f"fleet {server.fleet} at {server.address}; stop with Ctrl-C",
            highlight=False,
            markup=False,
        )

    with contextlib.ExitStack() as page:
        if view is not None:
            with needs("view"):
                from shoal.view.serving import serving  # noqa: PLC0415  (needs an extra)
            # Beside the store, because anyone who may read its folder may see its page.
            token_file = view.token_file or store / "view.token"

            def steered(wish: Wanted, run: str) -> str:
                return steer(ServerAccess(fleet, store, broker), wish, run)

            address = page.enter_context(serving(store, view, token_file, steered))
            text = f"page at {address}; log in with the token in {token_file}"
            console.print(text, highlight=False, markup=False, soft_wrap=True)
        serve_fleet(fleet, store, broker, own=own, listener=show, on_ready=ready)
    console.print("stopped")


def fleet_or_page(path: Path, broker: str | None, url: str) -> FleetConfig | Client:
    """Open the page if there is an address, otherwise the fleet.

    It raises the errors of `connect` and `read_fleet`.
    """
    if url:
        return connect(url)
    return read_fleet(path, broker)


def steer_run(
    source: FleetConfig | Client,
    verb: Literal["pause", "resume", "stop", "abandon"],
    run: str,
    done: str,
) -> None:
    """Pause, stop or resume a run, and print the effect.

    The run is given by its name, its id or a prefix of its id; "" is the run in progress.

    Raises:
        ShoalError: no server answers, or no such run is in progress.
    """
    if isinstance(source, Client):
        run_id = source.act(verb, run)
    else:
        # `go` is the protocol's word for a run that is not paused.
        wish: Wish = "go" if verb == "resume" else verb
        run_id = steer(source, wish, run)
    print_text(f"run {run_id} {done}")


def predict_at(
    source: FleetConfig, device: str, data: Path, seconds: float, *, as_json: bool
) -> None:
    """Print the predictions of a board's model for the samples in a file.

    It raises the errors of `predict` and `read_request`.
    """
    answer = predict(source, device, read_request(data), seconds)
    print_predictions(answer.model, answer.predictions, as_json=as_json)


def do_run(settings: FleetConfig, *, as_json: bool, boards: Sequence[Path] = ()) -> int:
    """Run once, print the outcome, and return the exit code.

    `boards` are the configurations of boards that run on this machine meanwhile.

    Raises a ShoalError if the run cannot start, or if one of these boards exits.
    """
    local = LocalBoards(boards, settings.fleet)
    try:
        # Progress goes to the error stream, so that a pipe gets only the result.
        with local.running(), RunDisplay(error_console(), settings.model.arch) as display:
            finished = run_fleet(settings, listener=display.show, notify=display.note)
    except KeyboardInterrupt:
        return _left(settings)
    if as_json:
        print_json(finished.model_dump(mode="json"))
    else:
        accuracy = "" if finished.evaluation is None else f", {finished.evaluation.summary}"
        name = finished.run
        if settings.run_name is not None:
            name = f"{settings.run_name} ({finished.run})"
        print_text(
            f"run {name} {finished.status} after {finished.rounds} rounds{accuracy}{_why(finished)}"
        )
    return finished.exit_code


def _why(finished: control.RunFinished) -> str:
    why = finished.error or finished.early
    return f": {why}" if why else ""


def _left(settings: FleetConfig) -> int:
    """After an interrupt, ask whether to stop the run or only to stop following it."""
    console = error_console()
    # A second interrupt, or an end of input, leaves without stopping the run.
    with contextlib.suppress(KeyboardInterrupt, typer.Abort):
        if sys.stdin.isatty() and typer.confirm(
            "\nstop the run? (otherwise it continues on its server)", err=True
        ):
            steer_run(settings, "stop", "", "ends after the round in progress")
            return INTERRUPTED
    console.print(
        "detached; the run continues on its server. Watch it with `shoal log -f`, or end it with"
        " `shoal stop`"
    )
    return INTERRUPTED
