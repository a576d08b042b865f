"""Make a global version the one that export-weights takes; its weights are kept."""

from collections.abc import Callable
from contextlib import closing
from typing import Annotated

import typer

from shoal.cli.common import DEFAULT_STORE, AsJson, RunId, StoreFolder
from shoal.cli.console import print_json, say
from shoal.cli.extras import needs

Number = Annotated[int, typer.Argument(min=0, help="Number of the version.")]


def choosing(how: str) -> Callable[..., None]:
    """A command that calls a function of `broker_server.store.choosing`."""

    def choose(version: Number, store: StoreFolder = DEFAULT_STORE, run: RunId = None, as_json: AsJson = False) -> None:
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
        say(f"version {chosen.number} of run {chosen.run} {done}")

    return choose


_promote = choosing("promote")
