"""The registry of architectures: those of the zoo, and the user's own from a file outside the
repository.

Importing this module does not import torch; `Registry.zoo` and `infer_layout` do.
"""

import hashlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from traceback import walk_tb
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar

from fleet_protocol.discovery import modules_of
from fleet_protocol.errors import ConfigError, ShoalError
from fleet_protocol.spelling import did_you_mean
from models.architecture import Architecture
from models.layout import Layout


class Own:
    """What a user's file may define beside architectures: a ``loss`` or ``metric``, found by this
    name in a recipe.
    """

    kind: ClassVar[str]
    name: ClassVar[str]


@dataclass(frozen=True)
class Registry:
    """Architectures by name, and losses and metrics of the user's files; all of it read-only.

    Example:
        >>> Registry.zoo().names[:4]
        ('cnn1', 'cnn2', 'conv', 'har_cnn')
    """

    entries: Mapping[str, Architecture]
    own: Mapping[str, type[Own]] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def of(cls, architectures: Iterable[Architecture]) -> "Registry":
        """Make a registry of some architectures; a ConfigError if two share a name."""
        return cls(_joined({}, architectures, "the list"))

    @classmethod
    def zoo(cls) -> "Registry":
        """Make the registry of the architectures that come with Shoal; imports torch.

        Raises:
            ConfigError: if torch is not installed.
        """
        try:
            families = list(modules_of("models.zoo"))
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ConfigError(
                "building models needs torch, which is not installed here; install shoal[export]"
            ) from error
        return cls.of(item for family in families for item in _found(family))

    def with_file(self, path: str | Path) -> "Registry":
        """A registry that has also every architecture, loss and metric that a user's Python file
        defines or imports.

        The file is executed, so it must be trusted.

        Raises:
            ConfigError: if the file is missing, fails, holds nothing of this, or a name already
                taken.
        """
        module = _executed(Path(path))
        found = [item for item in _found(module) if item not in self.entries.values()]
        values = [
            item
            for item in vars(module).values()
            if isinstance(item, type) and issubclass(item, Own)
        ]
        own = {item.name: item for item in values if hasattr(item, "name")}
        if not found and not own:
            raise ConfigError(
                f"{path} defines no architecture; decorate a builder with shoal.architecture(), or a function with"
                " shoal.loss() or shoal.metric()"
            )
        return Registry(
            _joined(self.entries, found, str(path)),
            MappingProxyType({**self.own, **own}),
        )

    def get(self, name: str) -> Architecture:
        """Look an architecture up.

        If there is none of this name, a ConfigError names the closest one.
        """
        try:
            return self.entries[name]
        except KeyError:
            raise ConfigError(
                f"unknown architecture {name!r}{did_you_mean(name, self.entries)};"
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


def infer_layout(arch: Architecture, settings: Mapping[str, Any] | None = None) -> Layout:
    """Infer the layout of an architecture's global model; imports torch.

    Raises:
        ConfigError: if a setting is unknown, or the model is built in a way that leaves its axes
            unclear.
    """
    from models.zoo import inference  # noqa: PLC0415  (torch)

    return inference.infer_layout(arch, settings)


def _joined(
    known: Mapping[str, Architecture], added: Iterable[Architecture], source: str
) -> Mapping[str, Architecture]:
    entries = dict(known)
    for item in added:
        if item.name in entries:
            raise ConfigError(
                f"architecture {item.name} of {source} has the name of another one; rename its function"
            )
        entries[item.name] = item
    return MappingProxyType(entries)


def _found(module: ModuleType) -> list[Architecture]:
    return list(
        {
            id(item): item for item in vars(module).values() if isinstance(item, Architecture)
        }.values()
    )


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
    beside = str(path.resolve().parent)
    if beside not in sys.path:
        sys.path.append(beside)  # as for a script, but behind what is installed
    try:
        spec.loader.exec_module(module)
    except ShoalError as error:
        raise ConfigError(f"model file {path}: {error}") from error
    except (Exception, SystemExit) as error:
        lines = (
            line
            for frame, line in walk_tb(error.__traceback__)
            if frame.f_code.co_filename == str(path)
        )
        line = next(lines, 0)
        where = f", line {line}" if line else ""
        raise ConfigError(f"model file {path}{where} failed: {error!r}") from error
    return module
