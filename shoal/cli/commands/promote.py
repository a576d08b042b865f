"""Select the global version that export-weights uses by default, and keep its weights.

Example: shoal promote 42
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shoal.cli.common import AsJson, PageUrl, RunId, StoreFolder
from shoal.cli.console import print_json, print_text
from shoal.extras import needs

if TYPE_CHECKING:
    from broker_server.store import RunRecord

Number = Annotated[int, typer.Argument(min=0, max=2**31 - 1, help="Number of the version.")]


def _next_use(has_ended: bool) -> str:
    """Return what follows from a rollback."""
    if has_ended:
        return (
            "the run has ended, so no round starts from it, and `shoal export-weights` writes it"
            " unless another version is promoted"
        )
    return "the run's next round starts from it"


def missing_parts(record: "RunRecord | None") -> str:
    """Return which parts a version of a run lacks, as a clause; empty if it lacks none."""
    from broker_server.settings.fleet import FleetConfig

    private = None if record is None else FleetConfig.stored(record.config).private
    if private is None or not private.parts:
        return ""
    parts = ", ".join(private.parts)
    return (
        f"; it has the fleet's initial values of {parts} ([private]), because each board keeps its"
        " own, which this command does not change"
    )


def choosing(verb: Literal["promote", "rollback"]) -> Callable[..., None]:
    """A command that promotes a version or rolls back to it."""

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
            records = [view.version for view in source.versions(run_id)]
            record = source.status(run_id).run
        has_ended = record is not None and record.ended_at is not None
        if verb == "rollback":
            # A rollback adds a new version with the old weights, so the newest one is the result.
            chosen = records[-1]
            effect = f"has the weights of version {version}; {_next_use(has_ended)}"
        else:
            chosen = next(record for record in records if record.number == version)
            effect = "is promoted"
        if as_json:
            print_json(queries.to_json_values(chosen))
            return
        missing = missing_parts(record)
        print_text(f"version {chosen.number} of run {chosen.run} {effect}{missing}")

    return choose


_promote = choosing("promote")
