"""The entry point: one Typer application, and one place where errors become exit codes."""

import logging
import sys
from importlib.metadata import version
from typing import Annotated

import typer
from rich.markup import escape

from fleet_protocol.errors import ShoalError
from shoal.cli.console import error_console
from shoal.cli.folder import CommandFolder

app = typer.Typer(
    cls=CommandFolder,
    name="shoal",
    help="Train one large model on a fleet of unequal boards.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"shoal {version('shoal')}")
        raise typer.Exit


@app.callback()
def _options(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens to standard error.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )


def main() -> None:
    """Run the command line; an error that is not a bug prints one message and its exit code."""
    try:
        app(prog_name="shoal")
    except ShoalError as error:
        error_console().print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        error_console().print("interrupted")
        sys.exit(130)


if __name__ == "__main__":
    main()
