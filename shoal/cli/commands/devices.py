"""List the devices that were ever seen, or let one out of quarantine."""

from typing import Annotated

import typer

from shoal.cli.common import DEFAULT_STORE, AsJson, RunId, StoreFolder, Watch
from shoal.cli.extras import needs

app = typer.Typer(add_completion=False, invoke_without_command=True, help=__doc__)


@app.callback()
def _devices(
    context: typer.Context,
    store: StoreFolder = DEFAULT_STORE,
    run: RunId = None,
    as_json: AsJson = False,
    watch: Watch = False,
) -> None:
    if context.invoked_subcommand is not None:
        return
    with needs("server"):
        from shoal.cli.stored import DEVICES

    DEVICES.show(store, run, as_json=as_json, watch=watch)


@app.command("release")
def _release(
    name: Annotated[str, typer.Argument(help="Id of the device.")],
    store: StoreFolder = DEFAULT_STORE,
    run: RunId = None,
) -> None:
    """Let a device take part again whose updates were refused too often."""
    with needs("server"):
        from shoal.cli.explained import release_device

    release_device(store, name, run)
