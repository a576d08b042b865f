"""Creates the commands that show a part of a store; all have the same options."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from shoal.cli.common import AsJson, PageUrl, RunId, StoreFolder, Watch
from shoal.extras import needs

if TYPE_CHECKING:
    from shoal.cli.views.view import View


def view_command(
    load_view: Callable[[], "View[Any]"], text: str | None, *, group: bool = False
) -> typer.Typer:
    """Return an app with the command that shows a view.

    Args:
        load_view: imports the view when the command runs, because it needs the extra ``server``.
        text: help text of the command.
        group: whether the command has subcommands.
    """
    app = typer.Typer(add_completion=False, invoke_without_command=group, help=text)

    def show(  # noqa: PLR0913  (an argument for each option of a command)
        context: typer.Context,
        store: StoreFolder,
        url: PageUrl = "",
        run: RunId = None,
        as_json: AsJson = False,
        watch: Watch = False,
    ) -> None:
        # The callback also runs before a subcommand.
        if context.invoked_subcommand is not None:
            return
        with needs("server"):
            view = load_view()
        view.show(store, run, as_json=as_json, watch=watch, url=url)

    if group:
        app.callback()(show)
    else:
        app.command(help=text)(show)
    return app
