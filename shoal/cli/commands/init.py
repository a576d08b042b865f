"""Make the folder of a fleet with identities: keys, certificates, and a configuration that runs."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.console import say
from shoal.cli.extras import needs


def _init(
    fleet: Annotated[str, typer.Argument(help="Name of the fleet.")],
    host: Annotated[str, typer.Option(help="Name or address under which boards reach the broker.")],
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
    with needs("server"):
        from broker_server.service.authority import Founding, found_fleet

    place = folder or Path(fleet)
    found_fleet(place, Founding(fleet, host, port, broker))
    say(f"fleet {fleet} in {place}; operator.pem and ca.key are secrets")
    say(f"start it:       shoal up --config {place / 'fleet.toml'}")
    say(f"add a device:   shoal enroll NAME --folder {place}")
