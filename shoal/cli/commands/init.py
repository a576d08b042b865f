"""Make the folder of a fleet with identities (--host), or of a project with model and data (--template)."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from fleet_protocol.errors import ConfigError
from shoal.cli.console import say
from shoal.cli.extras import needs
from shoal.cli.project import TEMPLATES, make_project


def _init(
    fleet: Annotated[str, typer.Argument(help="Name of the fleet.")],
    host: Annotated[str | None, typer.Option(help="Name or address under which boards reach the broker.")] = None,
    template: Annotated[
        str | None,
        typer.Option(
            autocompletion=lambda incomplete: [name for name in TEMPLATES if name.startswith(incomplete)],
            help=f"A project on this machine instead: {', '.join(TEMPLATES)}.",
        ),
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Where to; by default a folder of the fleet's name.")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the broker.")] = 8883,
    broker: Annotated[
        str,
        typer.Option(
            help="embedded, mosquitto (an installed one), emqx (on the host, with the files that are written), or "
            "mqtts://host:port of one with the fleet's certificates."
        ),
    ] = "embedded",
) -> None:
    place = folder or Path(fleet)
    if template is not None and host is None:
        make_project(place, template, fleet)
        say(f"project {fleet} in {place}; {place / 'README.md'} has the commands")
        return
    if host is None or template is not None:
        raise ConfigError("give --host for a fleet with identities, or --template for a project on this machine")
    with needs("server"):
        from broker_server.service.authority import Founding, found_fleet

    host = host.strip("[]")
    founding = Founding(fleet, host, port, broker)
    found_fleet(place, replace(founding, listen="::") if ":" in host else founding)
    say(f"fleet {fleet} in {place}; operator.pem and ca.key are secrets")
    say(f"start it:       shoal up --config {place / 'fleet.toml'}")
    say(f"add a device:   shoal enroll NAME --folder {place}")
