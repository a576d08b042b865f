"""List the rounds of a run, or explain one of them."""

from typing import Annotated

import typer

from shoal.cli.common import DEFAULT_STORE, AsJson, PageUrl, RunId, StoreFolder
from shoal.cli.extras import needs
from shoal.cli.listing import listing

app = listing("ROUNDS", __doc__, group=True)


@app.command("show")
def _show(
    number: Annotated[int, typer.Argument(min=1, help="Number of the round.")],
    store: StoreFolder = DEFAULT_STORE,
    url: PageUrl = "",
    run: RunId = None,
    as_json: AsJson = False,
) -> None:
    """Say who was asked in a round, who answered when, who was left out and why, with norms and
    weights.
    """
    with needs("server"):
        from shoal.cli.explained import show_round

    show_round(store, number, run, as_json=as_json, url=url)
