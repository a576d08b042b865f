"""Download data sets that do not come with Shoal.

Example: shoal data fetch mnist
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from fleet_protocol.errors import ConfigError
from shoal.cli.console import print_text

app = typer.Typer(no_args_is_help=True, add_completion=False)


# Without a callback, typer would leave out the name of the only command.
@app.callback(help=__doc__)
def _data() -> None: ...


@app.command("fetch")
def _fetch(
    name: Annotated[str, typer.Argument(help="Name of the data set.")],
    to: Annotated[
        Path | None,
        typer.Option(help="Target folder; by default, the folder that SHOAL_DATA names."),
    ] = None,
) -> None:
    """Download a data set, and verify the checksums of its files.

    Example: shoal data fetch mnist
    """
    from simulation.data.fetch import fetch

    # An empty variable counts as unset.
    folder = to or (Path(os.environ["SHOAL_DATA"]) if os.environ.get("SHOAL_DATA") else None)
    if folder is None:
        raise ConfigError("shoal data fetch: name a folder with --to, or set SHOAL_DATA")
    fetch(name, folder)
    print_text(f"{name} is ready in {folder}")
