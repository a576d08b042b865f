"""Options that several commands share, and their defaults from the project's folder.

In a folder with a ``fleet.toml`` no command needs ``--config`` or ``--store``.
"""

from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel

from fleet_protocol.configuration import load_config
from fleet_protocol.run_names import check_run_name

HERE = Path()
FLEET_FILE = Path("fleet.toml")
SIMULATION_FILE = Path("sim.toml")
DEVICE_FILE = Path("device.toml")
SOURCE = "Fleet and store"
OUTPUT = "Output"
"""Panels of a help text for options that many commands have."""
_STORE = Path("runs/store")
"""The store of a configuration without `store`."""


class _Project(BaseModel):
    """The store in a ``fleet.toml``; other keys are ignored."""

    store: Path = _STORE


def project_store() -> Path:
    """Return the store of the project in the current folder.

    It is the one that ``fleet.toml`` names, or ``runs/store`` if there is no such file.

    Raises:
        ConfigError: ``fleet.toml`` is not TOML, or its store is not a path.
    """
    if not FLEET_FILE.is_file():
        return _STORE
    return load_config(FLEET_FILE, _Project).store


def _unless_here(context: typer.Context, url: str) -> str:
    """The address of a page; options that name this machine override SHOAL_URL."""
    # A missing source has no name: not every command has all of these options.
    came = [
        getattr(context.get_parameter_source(name), "name", "")
        for name in ("url", "store", "folder", "config")
    ]
    # SHOAL_URL is a default for every command, so a typed path on this machine has priority.
    return "" if came[0] == "ENVIRONMENT" and "COMMANDLINE" in came else url


def checked_name(name: str | None) -> str | None:
    """The name of a new run, checked before the configuration is read."""
    if name is None:
        return None
    try:
        return check_run_name(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


StoreFolder = Annotated[
    Path,
    typer.Option(
        "--store",
        help="Folder of the server's store.",
        default_factory=project_store,
        show_default="the store of fleet.toml in this folder, or runs/store",
        rich_help_panel=SOURCE,
    ),
]
RunId = Annotated[
    str | None,
    typer.Option(
        help="Name or id of a run, or a prefix of the id. By default, lists and logs include all"
        " runs, and other commands use the newest run.",
        rich_help_panel=SOURCE,
    ),
]
FleetFolder = Annotated[Path, typer.Option(help="The fleet's folder from `shoal init`.")]
FleetFile = Annotated[
    Path,
    typer.Option(
        "--config",
        help="Configuration file of the fleet and its runs.",
        rich_help_panel=SOURCE,
    ),
]
RunInProgress = Annotated[
    str,
    typer.Option(
        "--run",
        help="Name or id of the run, or a prefix of the id; by default, the run in progress.",
    ),
]
NewName = Annotated[
    str | None,
    typer.Option(
        "--name",
        callback=checked_name,
        help="Name of the run, for --run and all lists; overrides run_name in the configuration.",
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON instead of a table.", rich_help_panel=OUTPUT)
]
Watch = Annotated[
    bool,
    typer.Option(
        "--watch", help="Print the output again whenever the store changes.", rich_help_panel=OUTPUT
    ),
]
_ASK = (
    "Read from the page at http(s)://host:port instead, with the token from SHOAL_TOKEN or from"
    " the file that SHOAL_TOKEN_FILE names."
)
PageUrl = Annotated[
    str,
    typer.Option(
        "--url", envvar="SHOAL_URL", callback=_unless_here, help=_ASK, rich_help_panel=SOURCE
    ),
]
BrokerUrl = Annotated[
    str | None,
    typer.Option(help="Use the broker at mqtt(s)://host:port instead of the configured one."),
]
ModelsFile = Annotated[
    Path | None,
    typer.Option(help="Python file with your own architectures.", rich_help_panel="Model"),
]
Settings = list[str] | None
