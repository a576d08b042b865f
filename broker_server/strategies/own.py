"""Strategies of users: a function that `strategy` marks, in a Python file or an installed package.

A file is run only if the configuration of the server or of a simulation names it
(`broker_server.settings.method`), and a package only if it names the package's strategy.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Generic

from broker_server.strategies.own_calls import OwnCode
from broker_server.strategies.strategy import Basis, Method, OptionsT, Strategy
from fleet_protocol.errors import ConfigError, ShoalError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.python_files import refusing_exits, run_file

GROUP = "shoal.strategies"
"""The group of entry points in which installed packages offer strategies."""

_HOW = "mark one function that takes a basis and returns a Strategy with @shoal.strategy()"


@dataclass(frozen=True)
class OwnStrategy(Generic[OptionsT]):
    """A user's function that builds a strategy.

    Attributes:
        build: the function.
        options: the type of ``[strategy.options]``; None for a strategy without options.
    """

    build: Callable[[Basis[OptionsT]], Strategy]
    options: type[OptionsT] | None = None


def strategy(
    options: type[OptionsT] | None = None,
) -> Callable[[Callable[[Basis[OptionsT]], Strategy]], OwnStrategy[OptionsT]]:
    """Mark a function as the builder of a user's strategy.

    The function takes a `Basis`, and returns a `Strategy`. It raises a PlanError if settings,
    model, tiers and optimizer are incompatible.

    Args:
        options: the class of the strategy's own settings, ``[strategy.options]``: a `FrozenModel`.

    Raises:
        ConfigError: the options are not such a class, or the function cannot take a basis.
    """
    is_model = isinstance(options, type) and issubclass(options, FrozenModel)
    if options is not None and not is_model:
        raise ConfigError(
            f"strategy() takes the class of the options, a subclass of shoal.FrozenModel, not"
            f" {options!r}; write @strategy() above a function without options"
        )

    def mark(build: Callable[[Basis[OptionsT]], Strategy]) -> OwnStrategy[OptionsT]:
        _require_basis_alone(build)
        return OwnStrategy(build, options)

    return mark


def load_file(path: Path) -> Method[Any]:
    """Run a user's file, and return the strategy in it.

    A process runs a file once, and again after it has changed.

    Raises:
        ConfigError: the file does not exist, fails, or does not contain exactly one strategy; the
            message is one line.
    """
    if not path.is_file():
        raise ConfigError(
            f"strategy.file: {path} does not exist; give a path relative to the folder of "
            "the configuration"
        )
    status = path.stat()
    return _load_file(path, (status.st_size, status.st_mtime_ns, status.st_ino))


@lru_cache(64)
def _load_file(path: Path, stamp: tuple[int, ...]) -> Method[Any]:
    """Load the strategy of a file; a new stamp marks a changed file."""
    del stamp
    code = OwnCode(f"strategy.file {path}", path.parent)
    try:
        module = run_file(path, "strategy")
    except ShoalError as error:
        raise ConfigError(f"strategy.file {path}: {error}") from error
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise code.failure("when it is run", error) from error
    # By the object, because one strategy may have two names in a file.
    strategies: dict[int, OwnStrategy[Any]] = {}
    names = []
    for name, value in vars(module).items():
        if isinstance(value, OwnStrategy) and id(value) not in strategies:
            strategies[id(value)] = value
            names.append(name)
    if not strategies:
        raise ConfigError(f"strategy.file {path} has no strategy; {_HOW}")
    if len(strategies) > 1:
        raise ConfigError(
            f"strategy.file {path} has {len(strategies)} strategies, {', '.join(names)}; "
            "keep one in the file, and move the others into separate files"
        )
    (marked,) = strategies.values()
    return _method(marked, code)


def installed_strategies(name: str) -> list[EntryPoint]:
    """Return the entry points of installed packages that offer a strategy of a given name."""
    return list(entry_points(group=GROUP, name=name))


def installed_names() -> tuple[str, ...]:
    """Return the names of all strategies that installed packages offer; imports none of them."""
    return tuple(sorted(entry_points(group=GROUP).names))


def load_installed(entry_point: EntryPoint) -> Method[Any]:
    """Import a package's strategy.

    Raises:
        ConfigError: the package fails, or its entry point names something else.
    """
    package = "a package" if entry_point.dist is None else f"package {entry_point.dist.name}"
    source = f"strategy {entry_point.name!r} of {package} ({entry_point.value})"
    try:
        marked = entry_point.load()
    except (Exception, SystemExit) as error:  # the package's code may raise anything
        raise OwnCode(source).failure("when it is imported", error) from error
    if not isinstance(marked, OwnStrategy):
        raise ConfigError(
            f"{source} is {type(marked).__name__}, not a strategy; its entry point must name a"
            " function that is marked with @shoal.strategy()"
        )
    return _method(marked, OwnCode(source, _folder_of(marked.build)))


def _folder_of(function: Callable[..., Any]) -> Path | None:
    """Return the folder of the file that defines a function; None unless it is in Python."""
    compiled = getattr(function, "__code__", None)
    return None if compiled is None else Path(compiled.co_filename).parent


def _method(marked: OwnStrategy[Any], code: OwnCode) -> Method[Any]:
    """Return a user's strategy as a method whose errors name its source."""

    def build(basis: Basis[Any]) -> Strategy:
        try:
            with refusing_exits():
                built = marked.build(basis)
        except ShoalError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise code.failure("when it builds the strategy", error) from error
        if not isinstance(built, Strategy):
            raise ConfigError(
                f"{code.source} builds {type(built).__name__}, not a Strategy; let the function end"
                " with `return replace(...)` of a built-in strategy, or `return Strategy(...)`"
            )
        # The run uses the name in its configuration.
        return replace(code.guard(built), name=basis.name)

    return Method(build, marked.options)


def _require_basis_alone(build: object) -> None:
    """Check that a function can be called with a basis and nothing else.

    Raises:
        ConfigError: it cannot.
    """
    if not callable(build):
        raise ConfigError(f"@strategy() marks {build!r}; {_HOW}")
    try:
        inspect.signature(build).bind(object())
    except TypeError as error:
        name = getattr(build, "__name__", repr(build))
        raise ConfigError(f"{name} must take one argument, the basis ({error}); {_HOW}") from error
