"""Run a server (broker, coordinator and store) until it is stopped.

Over MQTT, the server accepts only runs of its own configuration. If fleet.toml has the table
`model.export` and the model or its settings have changed, the command exports the model first.

Example: shoal up --view 8420
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fleet_protocol.configuration import validate_config
from fleet_protocol.errors import ConfigError
from shoal.cli.common import FLEET_FILE, SOURCE, BrokerUrl, project_store
from shoal.cli.grouped import grouped
from shoal.extras import needs


@dataclass(frozen=True)
class _Options:
    config: Annotated[
        Path | None,
        typer.Option(
            help="Configuration of the fleet, the store, the broker, and the runs that are"
            " requested over MQTT.",
            show_default="fleet.toml in this folder, unless --fleet is given",
            rich_help_panel=SOURCE,
        ),
    ] = None
    fleet: Annotated[
        str | None, typer.Option(help="Name of the fleet.", rich_help_panel=SOURCE)
    ] = None
    store: Annotated[
        Path | None, typer.Option(help="Folder of the store.", rich_help_panel=SOURCE)
    ] = None
    broker: BrokerUrl = None
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port of the broker that the server starts."),
    ] = None
    listen: Annotated[
        str | None,
        typer.Option(
            help="Address on which the server's Mosquitto listens; 0.0.0.0 lets boards on the"
            " network connect."
        ),
    ] = None
    insecure: Annotated[
        bool,
        typer.Option(help="Run without identities or encryption, on a network that you trust."),
    ] = False
    view: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Serve the store's page on this port."),
    ] = None


@grouped(_Options)
def _up(options: _Options) -> None:
    with needs("server"):
        from broker_server.settings.broker import BrokerConfig
        from broker_server.settings.fleet import ViewConfig
        from shoal.cli.serving import prepare_fleet, serve

    own = view = None
    config = _configuration(options)
    if config is not None:
        own = prepare_fleet(config, options.broker)
        # Check now, not when somebody requests a run.
        own.strategy.require_loadable()
        fleet = options.fleet or own.fleet
        store = options.store or own.store
        broker = own.broker
        view = own.view
    else:
        # Not None, or `_configuration` would have raised.
        fleet = str(options.fleet)
        store = options.store or project_store()
        broker = BrokerConfig() if options.broker is None else BrokerConfig(url=options.broker)
    changes = {
        "port": options.port,
        "listen": options.listen,
        "insecure": options.insecure or None,
    }
    # An option that was not typed must not override the configuration.
    typed = {key: value for key, value in changes.items() if value is not None}
    broker = validate_config(
        # Only what was written: defaults that depend on other settings follow the new values.
        {**broker.model_dump(exclude_unset=True), **typed},
        BrokerConfig,
        source="shoal up",
    )
    if options.view is not None:
        view = (view or ViewConfig()).model_copy(update={"port": options.view})
    if own is not None:
        own = own.model_copy(update={"fleet": fleet, "store": store.resolve(), "broker": broker})
    serve(fleet, store, broker, own, view)


def _configuration(options: _Options) -> Path | None:
    """Return the named configuration or the one of this folder; None if only a fleet is named.

    Raises:
        ConfigError: there is no configuration, and no fleet is named.
    """
    if options.config is not None or options.fleet is not None:
        return options.config
    if FLEET_FILE.is_file():
        return FLEET_FILE
    raise ConfigError(
        "shoal up: there is no fleet.toml in this folder; name a configuration with --config FILE, "
        "or the fleet with --fleet NAME"
    )
