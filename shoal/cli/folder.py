"""Commands found in a folder: `shoal --help` reads their docstrings, and only the one that is used is imported."""

import ast
import importlib
import pkgutil
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

import shoal.cli.commands


class CommandFolder(TyperGroup):
    """A group whose commands are the modules of `shoal.cli.commands`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for found in pkgutil.iter_modules(shoal.cli.commands.__path__):
            name = found.name.replace("_", "-")
            self.commands[name] = TyperCommand(name)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """What stands for a command in the list of all, without importing it: its help and nothing else, or None."""
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
    """A module's own application, or one of its single function: that of its name with an underscore before it."""
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
