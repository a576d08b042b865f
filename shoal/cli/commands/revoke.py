"""Remove a device from its fleet.

Example: shoal revoke attic
"""

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
        from broker_server.service.own_brokers import what_to_copy

    revoke(folder, name)
    say(f"{name} is revoked: a server that is up takes nothing more of it")
    say(what_to_copy(folder) or "the broker that this server started shuts it out within seconds")
