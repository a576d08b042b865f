"""Extend the enrolments of devices; connected devices receive them over the broker.

Example: shoal renew --days 365
"""

from typing import Annotated

import typer

from shoal.cli.common import HERE, FleetFolder
from shoal.cli.console import say
from shoal.extras import needs


def _renew(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Ids of devices; by default all that end."),
    ] = None,
    folder: FleetFolder = HERE,
    days: Annotated[
        int,
        typer.Option(min=0, max=36_500, help="Days from now until it ends; 0 for never."),
    ] = 365,
) -> None:
    with needs("server"):
        from broker_server.service.authority import renew

    done = renew(folder, names or (), days=days)
    say(
        f"renewed: {', '.join(done) or 'none, as none would end later'}; a server that is up "
        f"tells them"
    )
