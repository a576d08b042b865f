"""The registry of architectures: those of the zoo, and the user's own from a file outside the repository.

Importing this module does not import torch; building a model does.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Literal

from fleet_protocol.errors import ConfigError, PlanError, ShoalError
from models.cut import Cut
from models.layout import Layout, freeze
from models.tier import Tier

__all__ = ["Architecture", "Registry", "architecture", "build", "call_builder", "infer_layout"]

_REQUIRED = ("input_shape", "classes")


@dataclass(frozen=True)
class Architecture:
    """A builder of modules, with what is known of it before it is called.

    Attributes:
        name: its id, the name of the builder.
        build: called with a `Cut` and the settings as keywords; returns a torch module.
        input_dtype: ``float32``, or ``int64`` for tokens.
        defaults: every setting with its default.
        paper: where it was described, for people.
    """

    name: str
    build: Callable[..., Any]
    input_dtype: Literal["float32", "int64"]
    defaults: Mapping[str, Any]
    paper: str = ""

    def settings(self, overrides: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """Complete some settings with the defaults.

        Args:
            overrides: settings by name; lists become tuples, and so does a single value where the default is one.

        Returns:
            Every setting, read-only.

        Raises:
            ConfigError: if the architecture has no such setting.
        """
        given = dict(overrides or {})
        for name in given:
            if name not in self.defaults:
                raise ConfigError(
                    f"architecture {self.name} has no setting {name!r}{_did_you_mean(name, self.defaults)};"
                    f" its settings are {', '.join(self.defaults)}"
                )
        frozen: Mapping[str, Any] = freeze({**self.defaults, **given})
        wrapped = {
            name: (frozen[name],)
            for name, value in self.defaults.items()
            if isinstance(value, tuple) and isinstance(frozen[name], (bool, int, float, str))
        }
        return MappingProxyType({**frozen, **wrapped})


def architecture(
    *, input_dtype: Literal["float32", "int64"] = "float32", paper: str = ""
) -> Callable[[Callable[..., Any]], Architecture]:
    """Turn a builder into an `Architecture` of the same name.

    The builder takes a `Cut` and then keyword settings, all with defaults, ``input_shape`` and ``classes`` among
    them. Nothing is registered anywhere: a registry finds the architecture in the module that defines it.

    Args:
        input_dtype: dtype of one sample.
        paper: where the architecture was described.

    Returns:
        The decorator.
    """

    def decorate(builder: Callable[..., Any]) -> Architecture:
        name = getattr(builder, "__name__", "")
        if not name.isidentifier():
            raise ConfigError(f"an architecture needs a function with a name, not {builder!r}")
        parameters = list(inspect.signature(builder).parameters.values())
        settings = parameters[1:]
        open_ended = [item.name for item in settings if item.default is inspect.Parameter.empty]
        if not parameters or open_ended:
            wrong = f"{', '.join(open_ended)} has none" if open_ended else "it takes no cut"
            raise ConfigError(f"architecture {name} must take a cut, then keyword settings with defaults, but {wrong}")
        defaults = {item.name: freeze(item.default) for item in settings}
        missing = [item for item in _REQUIRED if item not in defaults]
        if missing:
            raise ConfigError(f"architecture {name} lacks the setting {missing[0]}, which every one must have")
        return Architecture(name, builder, input_dtype, MappingProxyType(defaults), paper)

    return decorate


@dataclass(frozen=True)
class Registry:
    """Architectures by name.

    Example:
        >>> Registry.zoo().names[:4]
        ('cnn1', 'cnn2', 'conv', 'har_cnn')

    Attributes:
        entries: the architectures, read-only.
    """

    entries: Mapping[str, Architecture]

    @classmethod
    def of(cls, architectures: Iterable[Architecture]) -> Registry:
        """Make a registry of some architectures.

        Raises:
            ConfigError: if two share a name.
        """
        return cls(_joined({}, architectures, "the list"))

    @classmethod
    def zoo(cls) -> Registry:
        """Make the registry of the architectures that come with Shoal; imports torch.

        Raises:
            ConfigError: if torch is not installed.
        """
        try:
            zoo = importlib.import_module("models.zoo")
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ConfigError(
                "building models needs torch, which is not installed here; install shoal[export]"
            ) from error
        return cls.of(_found(zoo))

    def with_file(self, path: str | Path) -> Registry:
        """Add every architecture that a user's Python file defines or imports.

        Args:
            path: the file. It is executed, so it must be trusted.

        Returns:
            A new registry; this one is unchanged.

        Raises:
            ConfigError: if the file is missing, fails, holds no architecture, or one of a name already taken.
        """
        module = _executed(Path(path))
        found = [item for item in _found(module) if item not in self.entries.values()]
        if not found:
            raise ConfigError(f"{path} defines no architecture; decorate a builder with @architecture() from models")
        return Registry(_joined(self.entries, found, str(path)))

    def get(self, name: str) -> Architecture:
        """Look an architecture up.

        Raises:
            ConfigError: if there is none of this name; the message names the closest one.
        """
        try:
            return self.entries[name]
        except KeyError:
            raise ConfigError(
                f"unknown architecture {name!r}{_did_you_mean(name, self.entries)};"
                f" there are {', '.join(self.names)} (add your own with --models FILE)"
            ) from None

    @property
    def names(self) -> tuple[str, ...]:
        """The names, sorted."""
        return tuple(sorted(self.entries))

    def __iter__(self) -> Iterator[Architecture]:
        return (self.entries[name] for name in self.names)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries


def build(
    arch: Architecture,
    tier: Tier | float = 1.0,
    depth: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Any:
    """Build the module of a sub-model, with fresh random weights.

    Args:
        arch: the architecture.
        tier: the sub-model's shape, or its width alone.
        depth: number of blocks where only a width is given; all if omitted.
        settings: settings that differ from the defaults.

    Returns:
        A torch module in the mode its layers start in.

    Raises:
        ConfigError: if a setting is unknown or the builder fails on it.
        PlanError: if the model cannot have this width or depth.
    """
    if isinstance(tier, Tier):
        depth, width = (tier.depth if depth is None else depth), tier.width
    else:
        width = tier
    Tier(width, 1 if depth is None else depth)
    cut = Cut(width, depth)
    module = call_builder(arch, cut, settings)
    if cut.blocks is None and depth not in (None, 1):
        raise PlanError(f"{arch.name} has no sub-model of depth {depth}; its depths are 1")
    return module


def call_builder(arch: Architecture, cut: Cut, settings: Mapping[str, Any] | None) -> Any:
    """Call a builder with a cut of one's own.

    Args:
        arch: the architecture.
        cut: answers the builder, and remembers its questions.
        settings: settings that differ from the defaults.

    Returns:
        What the builder returned.

    Raises:
        ConfigError: if a setting is unknown or the builder fails on it.
        PlanError: if the model cannot have the depth of the cut.
    """
    try:
        return arch.build(cut, **arch.settings(settings))
    except PlanError as error:
        raise PlanError(f"{arch.name}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{arch.name}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{arch.name} cannot be built: {error!r}; check its settings") from error


def infer_layout(arch: Architecture, settings: Mapping[str, Any] | None = None) -> Layout:
    """Infer the layout of an architecture's global model; imports torch.

    Args:
        arch: the architecture.
        settings: settings that differ from the defaults.

    Returns:
        The layout.

    Raises:
        ConfigError: if a setting is unknown, or the model is built in a way that leaves its axes unclear.
    """
    inference = importlib.import_module("models.zoo.inference")
    layout: Layout = inference.infer_layout(arch, settings)
    return layout


def _joined(
    known: Mapping[str, Architecture], added: Iterable[Architecture], source: str
) -> Mapping[str, Architecture]:
    entries = dict(known)
    for item in added:
        if item.name in entries:
            raise ConfigError(f"architecture {item.name} of {source} has the name of another one; rename its function")
        entries[item.name] = item
    return MappingProxyType(entries)


def _found(module: ModuleType) -> list[Architecture]:
    unique = {id(item): item for item in vars(module).values() if isinstance(item, Architecture)}
    return list(unique.values())


def _executed(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"model file {path} does not exist; give the path of a Python file")
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    name = f"shoal_user_models_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"model file {path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickling look their module up by name, so it has to be there while it runs.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ShoalError as error:
        raise ConfigError(f"model file {path}: {error}") from error
    except Exception as error:
        line = next((item.tb_lineno for item in _frames(error) if item.tb_frame.f_code.co_filename == str(path)), 0)
        where = f", line {line}" if line else ""
        raise ConfigError(f"model file {path}{where} failed: {error!r}") from error
    return module


def _frames(error: BaseException) -> Iterator[Any]:
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
