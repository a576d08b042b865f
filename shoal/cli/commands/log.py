"""Show a server's log.

Example: shoal log --without update-received --follow
"""

from typing import Annotated

import typer

from shoal.cli.common import AsJson, PageUrl, RunId, StoreFolder
from shoal.extras import needs


def _log(
    store: StoreFolder,
    url: PageUrl = "",
    run: RunId = None,
    last: Annotated[
        int,
        typer.Option(min=1, max=1_000_000, help="Number of newest lines to show."),
    ] = 50,
    kind: Annotated[
        list[str] | None,
        typer.Option(help="Show only lines of this kind, such as promoted; may be repeated."),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(help="Omit lines of this kind, such as update-received; may be repeated."),
    ] = None,
    device: Annotated[str, typer.Option(help="Show only lines about this device.")] = "",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", "--watch", help="Print new lines as they are written.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    with needs("server"):
        from broker_server.store.event_table import LineFilter
        from shoal.cli.views.log import LogQuery, follow_log, show_log

    show = follow_log if follow else show_log
    matching = LineFilter(tuple(kind or ()), tuple(without or ()), device)
    show(store, LogQuery(run, last, matching), as_json=as_json, url=url)
