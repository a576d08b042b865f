"""Make a store from a file of `shoal backup`, once all of it was checked."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.console import output_console
from shoal.cli.extras import needs

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def _restore(
    file: Annotated[Path, typer.Argument(help="The backup.")],
    store: Annotated[Path, typer.Argument(help="Folder to make.")],
) -> None:
    with needs("server"):
        from broker_server.store.backup import restore

    restore(file, store)
    output_console().print(f"{store} is what {file} holds", highlight=False, markup=False, soft_wrap=True)
