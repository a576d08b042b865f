"""Commands that list something of a store, each with the same options."""

import typer

from shoal.cli.common import DEFAULT_STORE, AsJson, PageUrl, RunId, StoreFolder, Watch
from shoal.cli.extras import needs


def listing(what: str, text: str | None, *, group: bool = False) -> typer.Typer:
    """A command that shows a `Shown` of `shoal.cli.stored`, imported when it is used.

    A group has more beside it.
    """
    made = typer.Typer(add_completion=False, invoke_without_command=group, help=text)

    def _list(
        context: typer.Context,
        store: StoreFolder = DEFAULT_STORE,
        url: PageUrl = "",
        run: RunId = None,
        as_json: AsJson = False,
        watch: Watch = False,
    ) -> None:
        if context.invoked_subcommand is None:
            with needs("server"):
                from shoal.cli import stored  # noqa: PLC0415  (an extra)
            getattr(stored, what).show(store, run, as_json=as_json, watch=watch, url=url)

    (made.callback() if group else made.command(help=text))(_list)
    return made
