"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_STORE = Path("runs/store")
HERE = Path()


def _unless_here(context: typer.Context, url: str) -> str:
    """The address of a page; what is typed of this machine counts before SHOAL_URL."""
    came = [
        getattr(context.get_parameter_source(name), "name", "")
        for name in ("url", "store", "folder", "config")
    ]
    return "" if came[0] == "ENVIRONMENT" and "COMMANDLINE" in came else url


StoreFolder = Annotated[Path, typer.Option("--store", help="Folder of the server's store.")]
RunId = Annotated[
    str | None,
    typer.Option(
        help="Id of a run, or its beginning; by default the newest, in a list of runs or lines all."
    ),
]
FleetFolder = Annotated[Path, typer.Option(help="The fleet's folder, as `shoal init` made it.")]
FLEET_FILE = Path("fleet.toml")
FleetFile = Annotated[
    Path,
    typer.Option("--config", help="The configuration of the fleet and its runs, fleet.toml."),
]
RunName = Annotated[
    str,
    typer.Option("--run", help="Id of the run, or its beginning; by default the one in progress."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Watch = Annotated[bool, typer.Option("--watch", help="Show it again whenever it changes.")]
_ASK = (
    "Ask the page at http[s]://host:port instead, with the token in SHOAL_TOKEN or the file "
    "SHOAL_TOKEN_FILE."
)
PageUrl = Annotated[
    str, typer.Option("--url", envvar="SHOAL_URL", callback=_unless_here, help=_ASK)
]
BrokerUrl = Annotated[
    str | None,
    typer.Option(help="mqtt[s]://host:port instead of the configured broker."),
]
ModelsFile = Annotated[
    Path | None, typer.Option(help="Python file with architectures of your own.")
]
Settings = list[str] | None
