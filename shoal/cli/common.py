"""Options that several commands have, and what they take from the folder of a project.

In a folder with a ``fleet.toml`` no command needs ``--config`` or ``--store``.
"""

from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel

from fleet_protocol.configuration import load_config

HERE = Path()
FLEET_FILE = Path("fleet.toml")
SIMULATION_FILE = Path("sim.toml")
DEVICE_FILE = Path("device.toml")
SOURCE = "Fleet and store"
OUTPUT = "Output"
"""Panels of a help text for options that many commands have."""
_STORE = Path("runs/store")
"""The store of a configuration that names none."""


class _Project(BaseModel):
    """A ``fleet.toml`` of which only the store is read."""

    store: Path = _STORE


def project_store() -> Path:
    """Return the store of the project in the current folder.

    It is the one that ``fleet.toml`` names, and ``runs/store`` where there is no such file.

    Raises:
        ConfigError: ``fleet.toml`` is not TOML, or its store is not a path.
    """
    if not FLEET_FILE.is_file():
        return _STORE
    return load_config(FLEET_FILE, _Project).store


def _unless_here(context: typer.Context, url: str) -> str:
    """The address of a page; what is typed of this machine counts before SHOAL_URL."""
    came = [
        getattr(context.get_parameter_source(name), "name", "")
        for name in ("url", "store", "folder", "config")
    ]
    return "" if came[0] == "ENVIRONMENT" and "COMMANDLINE" in came else url


StoreFolder = Annotated[
    Path,
    typer.Option(
        "--store",
        help="Folder of the server's store.",
        default_factory=project_store,
        show_default="the store of fleet.toml here, or runs/store",
        rich_help_panel=SOURCE,
    ),
]
RunId = Annotated[
    str | None,
    typer.Option(
        help="Id of a run, or its beginning; default: the newest, in a list of runs or lines all.",
        rich_help_panel=SOURCE,
    ),
]
FleetFolder = Annotated[Path, typer.Option(help="The fleet's folder, as `shoal init` made it.")]
FleetFile = Annotated[
    Path,
    typer.Option(
        "--config",
        help="The configuration of the fleet and its runs.",
        rich_help_panel=SOURCE,
    ),
]
RunName = Annotated[
    str,
    typer.Option("--run", help="Id of the run, or its beginning; by default the one in progress."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON instead of a table.", rich_help_panel=OUTPUT)
]
Watch = Annotated[
    bool, typer.Option("--watch", help="Show it again whenever it changes.", rich_help_panel=OUTPUT)
]
_ASK = (
    "Ask the page at http(s)://host:port instead, with the token in SHOAL_TOKEN or in the file "
    "SHOAL_TOKEN_FILE."
)
PageUrl = Annotated[
    str,
    typer.Option(
        "--url", envvar="SHOAL_URL", callback=_unless_here, help=_ASK, rich_help_panel=SOURCE
    ),
]
BrokerUrl = Annotated[
    str | None,
    typer.Option(help="mqtt(s)://host:port instead of the configured broker."),
]
ModelsFile = Annotated[
    Path | None,
    typer.Option(help="Python file with your own architectures.", rich_help_panel="Model"),
]
Settings = list[str] | None
