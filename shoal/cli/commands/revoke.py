"""Make a device no member of its fleet any more."""

from typing import Annotated

import typer

from shoal.cli.common import HERE, FleetFolder
from shoal.cli.console import say
from shoal.extras import needs


def _revoke(
    name: Annotated[str, typer.Argument(help="Id of the device.")],
    folder: FleetFolder = HERE,
) -> None:
    with needs("server"):
        from broker_server.service.authority import revoke

    revoke(folder, name)
    say(
        f"{name} is revoked: a server that is up takes nothing more of it, and the broker that it "
        f"started shuts it out "
        "within seconds"
    )
