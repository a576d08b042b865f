"""Download data sets that do not come with Shoal.

Example: shoal data fetch mnist
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from fleet_protocol.errors import ConfigError
from shoal.cli.console import say

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback(help=__doc__)
def _data() -> None: ...


@app.command("fetch")
def _fetch(
    name: Annotated[str, typer.Argument(help="Name of the data set.")],
    to: Annotated[
        Path | None, typer.Option(help="Folder; by default what SHOAL_DATA names.")
    ] = None,
) -> None:
    """Download a data set and verify its checksums.

    Example: shoal data fetch mnist
    """
    from simulation.data.fetch import fetch

    folder = to or (Path(os.environ["SHOAL_DATA"]) if os.environ.get("SHOAL_DATA") else None)
    if folder is None:
        raise ConfigError("shoal data fetch: name a folder with --to, or set SHOAL_DATA")
    fetch(name, folder)
    say(f"{name} is in {folder}")
