"""The registry of architectures: those of the zoo, and the user's own from other files.

Importing this module does not import torch; `Registry.zoo` and `infer_layout` do.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from traceback import walk_tb
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar

from fleet_protocol.discovery import modules_of
from fleet_protocol.errors import ConfigError, ShoalError
from fleet_protocol.python_files import run_file
from fleet_protocol.spelling import did_you_mean
from models.architecture import Architecture
from models.layout import Layout


class UserFunction:
    """A function of a user's file that recipes may name, besides architectures."""

    kind: ClassVar[str]  # ``loss`` or ``metric``
    name: ClassVar[str]


@dataclass(frozen=True)
class Registry:
    """Architectures by name, and losses and metrics of the user's files; read-only.

    Example:
        >>> Registry.zoo().names[:4]
        ('cnn1', 'cnn2', 'conv', 'har_cnn')
    """

    entries: Mapping[str, Architecture]
    own: Mapping[str, type[UserFunction]] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def from_architectures(cls, architectures: Iterable[Architecture]) -> "Registry":
        """Create a registry of some architectures.

        Raises:
            ConfigError: two architectures share a name.
        """
        return cls(_add({}, architectures, "the list"))

    @classmethod
    def zoo(cls) -> "Registry":
        """Create the registry of Shoal's architectures; imports torch.

        Raises:
            ConfigError: torch is not installed.
        """
        try:
            families = list(modules_of("models.zoo"))
        except ModuleNotFoundError as error:
            # Any other missing package is a fault of the installation, not the absence of torch.
            if error.name != "torch":
                raise
            raise ConfigError(
                "building models needs torch, which is not installed here; install shoal[export]"
            ) from error
        architectures: list[Architecture] = []
        for family in families:
            architectures += _architectures_of(family)
        return cls.from_architectures(architectures)

    def with_file(self, path: str | Path) -> "Registry":
        """Return a registry with all architectures, losses and metrics of a Python file, too.

        It contains what the file defines or imports. The file is executed, so it must be trusted.

        Raises:
            ConfigError: the file is missing, fails, defines none of these, or uses an existing
                name.
        """
        module = _execute(Path(path))
        present = self.entries.values()
        # A file may import architectures of the zoo to build on them.
        added: list[Architecture] = []
        for arch in _architectures_of(module):
            if arch not in present:
                added.append(arch)
        functions = _user_functions_of(module)
        if not added and not functions:
            raise ConfigError(
                f"{path} does not define an architecture; decorate a builder with"
                " shoal.architecture(), or a function with shoal.loss() or shoal.metric()"
            )
        return Registry(
            _add(self.entries, added, str(path)),
            MappingProxyType({**self.own, **functions}),
        )

    def get(
        self,
        name: str,
        adding: str = "--models FILE",
    ) -> Architecture:
        """Return the architecture with a name.

        Args:
            name: name in the zoo or in the user's file.
            adding: the option or key that adds the user's file, for messages.

        Raises:
            ConfigError: there is no such architecture; the message names the closest one.
        """
        try:
            return self.entries[name]
        except KeyError:
            raise ConfigError(
                f"unknown architecture {name!r}{did_you_mean(name, self.entries)}; choose from"
                f" {', '.join(self.names)} (add your own with {adding})"
            ) from None

    @property
    def names(self) -> tuple[str, ...]:
        """Return the sorted names."""
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
        ConfigError: a setting is unknown, or the axes of the model cannot be determined.
    """
    from models.zoo import inference  # noqa: PLC0415  (torch)

    return inference.infer_layout(arch, settings)


def _add(
    entries: Mapping[str, Architecture], added: Iterable[Architecture], source: str
) -> Mapping[str, Architecture]:
    """Add the architectures of a source by name."""
    joined = dict(entries)
    for arch in added:
        if arch.name in joined:
            raise ConfigError(
                f"architecture {arch.name} of {source} has the name of an existing one; rename"
                " its function"
            )
        joined[arch.name] = arch
    return MappingProxyType(joined)


def _architectures_of(module: ModuleType) -> list[Architecture]:
    """Return the architectures of a module; one with several names occurs once."""
    architectures: dict[int, Architecture] = {}
    for value in vars(module).values():
        if isinstance(value, Architecture):
            # By identity, because equal records may be different architectures.
            architectures[id(value)] = value
    return list(architectures.values())


def _user_functions_of(module: ModuleType) -> dict[str, type[UserFunction]]:
    """Return the losses and metrics of a module by name."""
    functions: dict[str, type[UserFunction]] = {}
    for value in vars(module).values():
        is_function = isinstance(value, type) and issubclass(value, UserFunction)
        if is_function and hasattr(value, "name"):  # base classes have no name
            functions[value.name] = value
    return functions


def _execute(path: Path) -> ModuleType:
    """Import a user's file as a module."""
    if not path.is_file():
        raise ConfigError(f"model file {path} does not exist; give the path of a Python file")
    try:
        return run_file(path, "models")
    except ShoalError as error:
        raise ConfigError(f"model file {path}: {error}") from error
    except SyntaxError as error:
        # It may be that of a file which this one imports.
        place = f"{error.filename or path}, line {error.lineno}"
        raise ConfigError(f"model file {path}: {place} is not valid Python: {error.msg}") from error
    # A user's file may raise anything, or call sys.exit.
    except (Exception, SystemExit) as error:
        where = _line_in(path, error)
        raise ConfigError(f"model file {path}{where} failed: {error!r}") from error


def _line_in(path: Path, error: BaseException) -> str:
    """Return the outermost line of a file that an error passed through; empty if none."""
    # The first frame of the file is the line that the user can change.
    for frame, line in walk_tb(error.__traceback__):
        if Path(frame.f_code.co_filename) == path.resolve():
            return f", line {line}" if line else ""
    return ""
