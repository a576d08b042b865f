"""Commands with many options take them as one frozen value, not as an argument each."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar, get_type_hints

Options = TypeVar("Options")


def grouped(
    options: type[Options],
) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Let Typer see the fields of a frozen dataclass, annotated as Typer's options are, as the
    options of a command.

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

    def parameter(field: Field[Any]) -> inspect.Parameter:
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        return inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=hints[field.name],
        )

    def decorate(function: Callable[[Options], None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            function(options(**values))

        signature = inspect.Signature([parameter(field) for field in fields(options)])  # type: ignore[arg-type]
        command.__signature__ = signature  # type: ignore[attr-defined]
        command.__annotations__ = hints
        command.__doc__ = function.__doc__
        return command

    return decorate
