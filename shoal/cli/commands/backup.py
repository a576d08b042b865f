"""Write a store to one file; its server may go on meanwhile."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.common import AsJson
from shoal.cli.console import print_json, say
from shoal.cli.extras import needs


def _backup(
    store: Annotated[Path, typer.Argument(help="Folder of the server's store.")],
    file: Annotated[Path, typer.Argument(help="File to write, for example store.zip.")],
    as_json: AsJson = False,
) -> None:
    with needs("server"):
        from broker_server.store.backup import back_up

    blobs = back_up(store, file)
    if as_json:
        print_json({"path": str(file), "blobs": blobs, "bytes": file.stat().st_size})
        return
    say(f"{store} with {blobs} blobs is in {file}")
