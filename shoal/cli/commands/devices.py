"""List the devices that were ever seen, or let one out of quarantine."""

from typing import Annotated

import typer

from shoal.cli.common import DEFAULT_STORE, PageUrl, RunId, StoreFolder
from shoal.cli.console import say
from shoal.cli.extras import needs
from shoal.cli.listing import listing

app = listing("DEVICES", __doc__, group=True)


@app.command("release")
def _release(
    name: Annotated[str, typer.Argument(help="Id of the device.")],
    store: StoreFolder = DEFAULT_STORE,
    url: PageUrl = "",
    run: RunId = None,
) -> None:
    """Let a device take part again whose updates were refused too often."""
    with needs("server"):
        from shoal.cli.stored import acted

    of = acted(store, url, "release", run, device=name)
    say(f"{name} is asked again from the next round of run {of}")
