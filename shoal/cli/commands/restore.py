"""Make a store from a file of `shoal backup`, once all of it was checked."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.common import AsJson
from shoal.cli.console import print_json, say
from shoal.cli.extras import needs


def _restore(
    file: Annotated[Path, typer.Argument(help="The backup.")],
    store: Annotated[Path, typer.Argument(help="Folder to make.")],
    as_json: AsJson = False,
) -> None:
    with needs("server"):
        from broker_server.store.backup import restore

    restore(file, store)
    if as_json:
        print_json({"path": str(store)})
    else:
        say(f"{store} is what {file} holds")
