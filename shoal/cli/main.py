"""The entry point: one Typer application, and one place where errors become exit codes.

Commands are found in a folder: `shoal --help` reads their docstrings, and only the one that is used
is imported.
"""

import ast
import errno
import importlib
import logging
import os
import pkgutil
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import shoal.cli.commands
from fleet_protocol.errors import ShoalError, StorageError
from fleet_protocol.logs import log_to_stderr
from shoal.cli.console import error_console, print_error


class CommandFolder(TyperGroup):
    """A group whose commands are the modules of `shoal.cli.commands`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for found in pkgutil.iter_modules(shoal.cli.commands.__path__):
            name = found.name.replace("_", "-")
            self.commands[name] = TyperCommand(name)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """What stands for a command in the list of all, without importing it: its help and nothing
        else, or None.
        """
        command = super().get_command(ctx, cmd_name)
        if command is not None and not command.help:
            command.help = _docstring(cmd_name)
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command that is used."""
        name, found, rest = super().resolve_command(ctx, args)
        if name is None or found is None:
            return name, found, rest
        command = typer.main.get_command(_app(importlib.import_module(_module(name)), name))
        command.name = name
        return name, command, rest


def _app(module: ModuleType, name: str) -> typer.Typer:
    """A module's own application, or one of its single function: that of its name with an
    underscore before it.
    """
    if hasattr(module, "app"):
        found: typer.Typer = module.app
        return found
    made = typer.Typer(add_completion=False)
    made.command(help=module.__doc__)(getattr(module, f"_{name.replace('-', '_')}"))
    return made


def _module(name: str) -> str:
    return f"{shoal.cli.commands.__name__}.{name.replace('-', '_')}"


def _docstring(name: str) -> str:
    spec = find_spec(_module(name))
    source = getattr(spec and spec.loader, "get_source", lambda _: None)(_module(name))
    return ast.get_docstring(ast.parse(source or "")) or ""


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
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Log what happens to standard error."),
    ] = False,
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version.",
        ),
    ] = False,
) -> None:
    log_to_stderr(
        logging.INFO if verbose else logging.WARNING,
        "%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


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
        print_error(str(error))
        sys.exit(error.exit_code)
    except OSError as error:
        if error.filename is None and error.errno not in {
            errno.ENOSPC,
            errno.EIO,
            errno.EPIPE,
        }:
            raise
        what = (
            "what this prints cannot be written"
            if error.filename is None
            else f"cannot use {error.filename}"
        )
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # or Python says it again when it ends
        print_error(f"{what}: {error.strerror}")
        sys.exit(StorageError.exit_code)
    except KeyboardInterrupt:
        error_console().print("interrupted")
        sys.exit(130)


if __name__ == "__main__":
    main()
