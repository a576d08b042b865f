"""Creates the commands that show a part of a store; all have the same options."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup
from typing_extensions import override

from shoal.cli.common import AsJson, PageUrl, RunId, StoreFolder, Watch
from shoal.extras import needs

if TYPE_CHECKING:
    from shoal.cli.views.view import View


class _NamingGroup(TyperGroup):
    """A group whose error for an unknown command names the known ones: `shoal rounds 3`."""

    @override
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands:
            names = ", ".join(sorted(self.commands))
            ctx.fail(f"No such command {args[0]!r}; `{ctx.command_path}` has the commands: {names}")
        return super().resolve_command(ctx, args)


def view_command(
    load_view: Callable[[], "View[Any]"], text: str | None, *, group: bool = False
) -> typer.Typer:
    """Return an app with the command that shows a view.

    Args:
        load_view: imports the view when the command runs, because it needs the extra ``server``.
        text: help text of the command.
        group: whether the command has subcommands.
    """
    app = typer.Typer(
        cls=_NamingGroup, add_completion=False, invoke_without_command=group, help=text
    )

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
