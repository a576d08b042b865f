"""Remove a device from its fleet.

Example: shoal revoke attic
"""

from typing import Annotated

import typer

from shoal.cli.common import HERE, FleetFolder
from shoal.cli.console import print_text
from shoal.extras import needs


def _revoke(
    name: Annotated[str, typer.Argument(help="Id of the device.")],
    folder: FleetFolder = HERE,
) -> None:
    with needs("server"):
        from broker_server.service.authority import revoke
        from broker_server.service.own_brokers import what_to_copy

    revoke(folder, name)
    print_text(f"{name} is revoked: a running server ignores its messages from now on")
    print_text(
        what_to_copy(folder) or "the broker that this server started disconnects it within seconds"
    )
