"""Select a global version as the one that export-weights takes, and keep its weights.

Example: shoal promote 42
"""

from collections.abc import Callable
from typing import Annotated, Literal

import typer

from shoal.cli.common import AsJson, PageUrl, RunId, StoreFolder
from shoal.cli.console import print_json, say
from shoal.extras import needs

Number = Annotated[int, typer.Argument(min=0, max=2**31 - 1, help="Number of the version.")]


def choosing(verb: Literal["promote", "rollback"]) -> Callable[..., None]:
    """A command that does one of both with a version."""

    def choose(
        version: Number,
        store: StoreFolder,
        url: PageUrl = "",
        run: RunId = None,
        as_json: AsJson = False,
    ) -> None:
        with needs("server"):
            from broker_server.store import queries
            from shoal.sources import open_source

        with open_source(store, url, read_only=False) as source:
            run_id = source.act(verb, run or "", version=version)
        with open_source(store, url) as source:
            records = [view.version for view in source.versions(run_id)]
        if verb == "rollback":
            chosen = records[-1]
            effect = f"is version {version} again, where the run's next round starts"
        else:
            chosen = next(record for record in records if record.number == version)
            effect = "is promoted"
        if as_json:
            print_json(queries.to_json_values(chosen))
            return
        say(f"version {chosen.number} of run {chosen.run} {effect}")

    return choose


_promote = choosing("promote")
