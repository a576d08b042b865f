"""List the devices that were ever seen, or let one out of quarantine."""

from typing import Annotated

import typer

from shoal.cli.common import DEFAULT_STORE, RunId, StoreFolder
from shoal.cli.extras import needs
from shoal.cli.listing import listing

app = listing("DEVICES", __doc__, group=True)


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
