"""Make a global version the one that export-weights takes; its weights are kept."""

from contextlib import closing
from typing import Annotated

import typer

from shoal.cli.common import DEFAULT_STORE, AsJson, RunId, StoreFolder
from shoal.cli.console import output_console, print_json
from shoal.cli.extras import needs

Number = Annotated[int, typer.Argument(min=0, help="Number of the version.")]


def choosing(how: str, text: str | None) -> typer.Typer:
    """A command that says which version counts.

    Args:
        how: function of `broker_server.store.choosing` that does so.
        text: the help.
    """
    made = typer.Typer(add_completion=False)

    @made.command(help=text)
    def _choose(
        version: Number, store: StoreFolder = DEFAULT_STORE, run: RunId = None, as_json: AsJson = False
    ) -> None:
        with needs("server"):
            from broker_server.store import Store, choosing, queries
            from shoal.cli.stored import stored_version

        found = stored_version(store, run, version).record
        with closing(Store(store)) as opened:
            chosen = getattr(choosing, how)(opened, found)
        if as_json:
            print_json(queries.plain(chosen))
            return
        done = "is promoted" if chosen is found else f"is version {version} again; the next round starts there"
        output_console().print(f"version {chosen.number} of run {chosen.run} {done}", highlight=False, soft_wrap=True)

    return made


app = choosing("promote", __doc__)
