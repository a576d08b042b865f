"""Show what the server noted."""

from typing import Annotated

import typer

from shoal.cli.common import DEFAULT_STORE, AsJson, PageUrl, RunId, StoreFolder
from shoal.extras import needs


def _log(
    store: StoreFolder = DEFAULT_STORE,
    url: PageUrl = "",
    run: RunId = None,
    last: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="So many of the newest lines.")
    ] = 50,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", "--watch", help="Go on with what comes.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    with needs("server"):
        from shoal.cli.views.log import follow_log, show_log

    show = follow_log if follow else show_log
    show(store, run, last=last, as_json=as_json, url=url)
