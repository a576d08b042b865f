"""The entry point: one Typer application, and one place where errors become exit codes."""

import errno
import logging
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fleet_protocol.errors import ShoalError, StorageError
from fleet_protocol.logs import log_to_stderr
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
    log_to_stderr(logging.INFO if verbose else logging.WARNING, "%(asctime)s %(levelname)s %(name)s: %(message)s")


def main() -> None:
    """Run the command line; an error that is not a bug prints one message and its exit code."""
    for name in ("stdout", "stderr"):  # whoever started it may have closed them
        setattr(sys, name, getattr(sys, name) or Path(os.devnull).open("w"))  # noqa: SIM115
    try:
        try:
            app(prog_name="shoal")
        finally:
            sys.stdout.flush()
    except ShoalError as error:
        error_console().print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.filename is None and error.errno not in {errno.ENOSPC, errno.EIO, errno.EPIPE}:
            raise
        what = "what this prints cannot be written" if error.filename is None else f"cannot use {error.filename}"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python says it again when it ends
        error_console().print(f"[bold red]error:[/] {escape(what)}: {error.strerror}")
        sys.exit(StorageError.exit_code)
    except KeyboardInterrupt:
        error_console().print("interrupted")
        sys.exit(130)


if __name__ == "__main__":
    main()
