"""List the rounds of a run, or explain one round.

Example: shoal rounds show 12
"""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.common import AsJson, PageUrl, RunId, StoreFolder
from shoal.cli.listing import view_command
from shoal.extras import needs

if TYPE_CHECKING:
    from shoal.cli.views.view import View


def _load_view() -> "View[Any]":
    from shoal.cli.views.rounds import ROUNDS

    return ROUNDS


app = view_command(_load_view, __doc__, group=True)


@app.command("show")
def _show(
    number: Annotated[int, typer.Argument(min=1, help="Number of the round.")],
    store: StoreFolder,
    url: PageUrl = "",
    run: RunId = None,
    as_json: AsJson = False,
) -> None:
    """Show each device's update, norm and weight in a round, and why other devices were left out.

    Example: shoal rounds show 12
    """
    with needs("server"):
        from shoal.cli.views.explained_round import show_round

    show_round(store, number, run, as_json=as_json, url=url)
