"""List the rounds of a run, or explain one of them."""

from typing import Annotated

import typer

from shoal.cli.common import DEFAULT_STORE, AsJson, RunId, StoreFolder, Watch
from shoal.cli.extras import needs

app = typer.Typer(add_completion=False, invoke_without_command=True, help=__doc__)


@app.callback()
def _rounds(
    context: typer.Context,
    store: StoreFolder = DEFAULT_STORE,
    run: RunId = None,
    as_json: AsJson = False,
    watch: Watch = False,
) -> None:
    if context.invoked_subcommand is not None:
        return
    with needs("server"):
        from shoal.cli.stored import ROUNDS

    ROUNDS.show(store, run, as_json=as_json, watch=watch)


@app.command("show")
def _show(
    number: Annotated[int, typer.Argument(min=1, help="Number of the round.")],
    store: StoreFolder = DEFAULT_STORE,
    run: RunId = None,
    as_json: AsJson = False,
) -> None:
    """Say who was asked in a round, who answered when, who was left out and why, with norms and weights."""
    with needs("server"):
        from shoal.cli.explained import show_round

    show_round(store, number, run, as_json=as_json)
