"""``shoal data``: data sets that are not shipped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fleet_protocol.errors import ConfigError
from shoal_cli.console import output_console

__all__ = ["app"]

app = typer.Typer(help="Fetch data sets that are not shipped.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Fetch data sets that are not shipped."""


@app.command("fetch")
def _fetch(
    name: Annotated[str, typer.Argument(help="Name of the data set.")],
    to: Annotated[Path | None, typer.Option(help="Folder; by default what SHOAL_DATA names.")] = None,
) -> None:
    """Download a data set and verify its checksums."""
    from simulation.fetch import fetch  # noqa: PLC0415  (with its tables, needed here alone)

    folder = to or (Path(os.environ["SHOAL_DATA"]) if os.environ.get("SHOAL_DATA") else None)
    if folder is None:
        raise ConfigError("shoal data fetch: name a folder with --to, or set SHOAL_DATA")
    fetch(name, folder)
    output_console().print(f"{name} is in {folder}", highlight=False)
