"""The entry point: one Typer application, and the one place that turns errors into exit codes.

The commands are the modules of a folder: `shoal --help` reads their docstrings, and only the
    command that runs is imported.
"""

import ast
import errno
import importlib
import logging
import os
import pkgutil
import sys
from importlib.abc import InspectLoader
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
from shoal.cli.failures import print_failure
from shoal.packages import OWN_PACKAGES

_OUTPUT_ERRORS = {errno.ENOSPC, errno.EIO, errno.EPIPE}
"""Errors without a file name that concern the output of a command."""


_PANELS = {
    "Train": ("demo", "init", "export", "export-mutual", "run", "up", "pause", "resume", "stop"),
    "Fleet": ("status", "devices", "enroll", "renew", "revoke", "rollout", "view", "log", "advice"),
    "Boards": ("device", "flash"),
    "Results": (
        "runs",
        "rename",
        "rounds",
        "versions",
        "compare",
        "promote",
        "rollback",
        "export-weights",
        "track",
        "backup",
        "restore",
    ),
    "Research": ("simulate", "reproduce", "data", "bench"),
}
"""The commands in the order of `shoal --help`, by panel."""


class CommandFolder(TyperGroup):
    """A group whose commands are the modules of `shoal.cli.commands`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for module in pkgutil.iter_modules(shoal.cli.commands.__path__):
            name = module.name.replace("_", "-")
            # A placeholder: it has a name and a panel, and `get_command` adds the help.
            self.commands[name] = TyperCommand(name)
        for panel, names in _PANELS.items():
            for name in names:
                if name in self.commands:
                    self.commands[name].rich_help_panel = panel  # type: ignore[attr-defined]

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002  (the framework's signature)
        """Return the names of all commands in the order of their panels."""
        in_panels = [name for names in _PANELS.values() for name in names]
        # A module without a panel must still be listed.
        without_panel = sorted(self.commands.keys() - set(in_panels))
        return [*filter(self.commands.__contains__, in_panels), *without_panel]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command with only its help text, for the list of commands; None if unknown.

        The module of the command is read and not imported.
        """
        command = super().get_command(ctx, cmd_name)
        if command is not None and not command.help:
            command.help = _docstring(cmd_name)
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command that runs."""
        name, listed_command, arguments = super().resolve_command(ctx, args)
        if name is None or listed_command is None:
            return name, listed_command, arguments
        module = importlib.import_module(_module(name))
        command = typer.main.get_command(_app(module, name))
        command.name = name
        return name, command, arguments


def _app(module: ModuleType, name: str) -> typer.Typer:
    """Return the application of a command's module.

    A module without an `app` has one function: an underscore and the command's name.
    """
    if hasattr(module, "app"):
        own_app: typer.Typer = module.app
        return own_app
    function = getattr(module, f"_{name.replace('-', '_')}")
    app = typer.Typer(add_completion=False)
    app.command(help=module.__doc__)(function)
    return app


def _module(name: str) -> str:
    """Return the dotted name of a command's module."""
    return f"{shoal.cli.commands.__name__}.{name.replace('-', '_')}"


def _docstring(name: str) -> str:
    """Return the docstring of a command's module, which is not imported."""
    spec = find_spec(_module(name))
    if spec is None or not isinstance(spec.loader, InspectLoader):
        return ""
    # Reading the source costs far less than importing the module's packages.
    source = spec.loader.get_source(_module(name))
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
        int,
        typer.Option(
            "--verbose",
            "-v",
            count=True,
            help="Log events to standard error; -vv also logs details and the tracebacks of"
            " errors.",
        ),
    ] = 0,
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
    if verbose > 1:
        # Details of Shoal's packages only: those of others would hide them.
        for package in ("shoal", *OWN_PACKAGES):
            logging.getLogger(package).setLevel(logging.DEBUG)


def _open_closed_streams() -> None:
    """Replace standard output and error by a null device if the parent process closed them."""
    for name in ("stdout", "stderr"):
        # Python sets a stream to None if its file descriptor was closed at the start.
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115


def main() -> None:
    """Run the command line; an expected error prints one message and sets the exit code."""
    _open_closed_streams()
    try:
        try:
            app(prog_name="shoal")
        # Flush here, where an error still leads to an exit code.
        finally:
            sys.stdout.flush()
    except ShoalError as error:
        print_failure(error)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.filename is not None:
            problem = f"cannot use {error.filename}"
        elif error.errno in _OUTPUT_ERRORS:
            problem = "cannot write the output"
        else:
            # An error without a file that does not concern the output is a bug.
            raise
        # Python flushes standard output again at exit, and would report the error twice.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print_error(f"{problem}: {error.strerror}")
        sys.exit(StorageError.exit_code)
    except KeyboardInterrupt:
        error_console().print("interrupted")
        # 128 plus the number of SIGINT, as shells report it.
        sys.exit(130)


if __name__ == "__main__":
    main()
