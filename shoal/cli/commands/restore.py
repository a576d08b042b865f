"""Make a store from a file of `shoal backup`, once all of it was checked."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.console import say
from shoal.cli.extras import needs


def _restore(
    file: Annotated[Path, typer.Argument(help="The backup.")],
    store: Annotated[Path, typer.Argument(help="Folder to make.")],
) -> None:
    with needs("server"):
        from broker_server.store.backup import restore

    restore(file, store)
    say(f"{store} is what {file} holds")
