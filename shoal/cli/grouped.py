"""Lets commands with many options receive them as one frozen value."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, get_type_hints

Options = TypeVar("Options")


def grouped(
    options: type[Options], declared: Mapping[str, Any] = MappingProxyType({})
) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Let Typer use the fields of a frozen dataclass as the options of a command.

    Args:
        options: the dataclass. Its fields may be annotated like Typer's options.
        declared: Typer's option of each field, for a dataclass that does not know Typer.

    Example:
        >>> @dataclass(frozen=True)
        ... class Options:
        ...     arch: Annotated[str, typer.Option(help="Name of the architecture.")]
        ...     seed: int = 0
        >>> @app.command()
        ... @grouped(Options)
        ... def export(options: Options) -> None: ...
    """
    hints = get_type_hints(options, include_extras=True)
    for name, option in declared.items():
        hints[name] = Annotated[hints[name], option]
    parameters = []
    for field in fields(options):  # type: ignore[arg-type]
        parameters.append(_parameter(field, hints[field.name]))

    def decorate(function: Callable[[Options], None]) -> Callable[..., None]:
        # Typer passes the options by name.
        def command(**values: Any) -> None:
            function(options(**values))

        # Typer reads these, so it sees the fields instead of the function's one argument.
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = hints
        command.__doc__ = function.__doc__
        return command

    return decorate


def _parameter(field: Field[Any], annotation: Any) -> inspect.Parameter:
    """Return a field as a parameter of a function."""
    default = field.default
    if default is MISSING:
        default = inspect.Parameter.empty
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )
