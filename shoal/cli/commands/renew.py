"""Let the enrolments of devices end later; who is connected hears it, and need not be touched."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.console import say
from shoal.cli.extras import needs


def _renew(
    names: Annotated[list[str] | None, typer.Argument(help="Ids of devices; by default all that end.")] = None,
    folder: Annotated[Path, typer.Option(help="The fleet's folder, as `shoal init` made it.")] = Path(),
    days: Annotated[int, typer.Option(min=0, max=36_500, help="Days from now until it ends; 0 for never.")] = 365,
) -> None:
    with needs("server"):
        from broker_server.service.authority import renew

    done = renew(folder, names or (), days=days)
    say(f"renewed: {', '.join(done) or 'none, as none would end later'}; a server that is up tells them")
