"""``shoal up`` and ``shoal run``: the server, until stopped or for one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from broker_server.config import BrokerConfig, FleetConfig
from broker_server.launch import run_fleet, serve_fleet
from broker_server.server import Server
from fleet_protocol import control
from fleet_protocol.config import load_config
from fleet_protocol.errors import ConfigError
from shoal_cli.console import error_console, output_console, print_json
from shoal_cli.progress import RunDisplay

__all__ = ["add_to"]

Config = Annotated[Path, typer.Option(help="The run's configuration, fleet.toml.")]
Broker = Annotated[str | None, typer.Option(help="mqtt[s]://host:port instead of the configured broker.")]


def _read(path: Path, broker: str | None) -> FleetConfig:
    config = load_config(path, FleetConfig).relative_to(path.resolve().parent)
    if broker is None:
        return config
    return config.model_copy(update={"broker": config.broker.model_copy(update={"url": broker})})


def _up(
    config: Annotated[Path | None, typer.Option(help="Take fleet, store and broker from this fleet.toml.")] = None,
    fleet: Annotated[str | None, typer.Option(help="Name of the fleet.")] = None,
    store: Annotated[Path | None, typer.Option(help="Folder of the store.")] = None,
    broker: Broker = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port of the embedded broker.")] = None,
    listen: Annotated[str | None, typer.Option(help="Address of the embedded broker; 0.0.0.0 lets boards in.")] = None,
) -> None:
    """Start broker, coordinator and store, and take run requests until stopped."""
    if config is not None:
        base = _read(config, broker)
        fleet, store, broker_config = fleet or base.fleet, store or base.store, base.broker
    elif fleet is not None:
        broker_config = BrokerConfig() if broker is None else BrokerConfig(url=broker)
    else:
        raise ConfigError("shoal up: name a configuration with --config fleet.toml, or the fleet with --fleet NAME")
    changes = {key: value for key, value in {"port": port, "listen": listen}.items() if value is not None}
    broker_config = broker_config.model_copy(update=changes)
    console = error_console()
    display: list[RunDisplay] = []

    def show(event: control.RunEvent) -> None:
        if isinstance(event, control.RunStarted):
            display.append(RunDisplay(console, event.run))
            display[-1].__enter__()
        if display:
            display[-1].show(event)
        if isinstance(event, control.RunFinished) and display:
            display.pop().__exit__(None, None, None)
            console.print(f"run {event.run} {event.status}")

    def ready(server: Server) -> None:
        console.print(f"fleet [bold]{server.fleet}[/] at {server.address}; stop with Ctrl-C", highlight=False)

    serve_fleet(fleet, store or Path("runs/store"), broker_config, listener=show, on_ready=ready)
    console.print("stopped")


def _report(finished: control.RunFinished, as_json: bool) -> None:
    if as_json:
        print_json(finished.model_dump(mode="json"))
    else:
        accuracy = "" if finished.evaluation is None else f", {finished.evaluation.summary}"
        why = f": {finished.error}" if finished.error else ""
        output_console().print(
            f"run {finished.run} {finished.status} after {finished.rounds} rounds{accuracy}{why}",
            highlight=False,
            markup=False,
        )
    if finished.status == "stopped":
        error_console().print("the run goes on when the same command is given again")
    if finished.exit_code:
        raise typer.Exit(finished.exit_code)


def _run(
    config: Config,
    broker: Broker = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Do a run: on the server that is up on the broker, or with a server of its own for as long as it lasts."""
    settings = _read(config, broker)
    with RunDisplay(error_console(), settings.model.arch) as display:
        finished = run_fleet(settings, listener=display.show)
    _report(finished, as_json)


def add_to(app: typer.Typer) -> None:
    """Register the commands.

    Args:
        app: the application.
    """
    app.command("up")(_up)
    app.command("run")(_run)
