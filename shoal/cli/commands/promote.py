"""Make a global version the one that export-weights takes; its weights are kept."""

from collections.abc import Callable
from typing import Annotated, Literal

import typer

from shoal.cli.common import DEFAULT_STORE, AsJson, PageUrl, RunId, StoreFolder
from shoal.cli.console import print_json, say
from shoal.cli.extras import needs

Number = Annotated[int, typer.Argument(min=0, max=2**31 - 1, help="Number of the version.")]


def choosing(verb: Literal["promote", "rollback"]) -> Callable[..., None]:
    """A command that does one of both with a version."""

    def choose(
        version: Number,
        store: StoreFolder = DEFAULT_STORE,
        url: PageUrl = "",
        run: RunId = None,
        as_json: AsJson = False,
    ) -> None:
        with needs("server"):
            from broker_server.store import queries
            from shoal.cli.source import opened
            from shoal.cli.stored import VERSIONS, acted

        of = acted(store, url, verb, run, version=version)
        with opened(store, url) as source:
            known = [view.version for view in VERSIONS.look(source, of)]
        chosen = (
            known[-1]
            if verb == "rollback"
            else next(item for item in known if item.number == version)
        )
        if as_json:
            print_json(queries.to_json_values(chosen))
            return
        done = (
            "is promoted"
            if verb == "promote"
            else f"is version {version} again, where the run's next round starts"
        )
        say(f"version {chosen.number} of run {chosen.run} {done}")

    return choose


_promote = choosing("promote")
