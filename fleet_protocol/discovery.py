"""Finds the entries of a package's modules, so that a new entry needs only a new file."""

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

from fleet_protocol.errors import ConfigError


def modules_of(package: str) -> Iterator[ModuleType]:
    """Import the modules directly in a package, in the order of their names.

    Its program (``__main__``) is left out.
    """
    path = importlib.import_module(package).__path__
    # Sorted, so that the order does not depend on the file system.
    for name in sorted(module.name for module in pkgutil.iter_modules(path)):
        if name != "__main__":
            yield importlib.import_module(f"{package}.{name}")


def discover(package: str, constant: str) -> Mapping[str, Any]:
    """Join the mappings that modules of a package define under one constant's name.

    The entries are in the order of the modules' names.

    Example:
        >>> list(discover("broker_server.strategies", "STRATEGIES"))[:2]
        ['fedavg', 'fedmedian']

    Raises:
        ConfigError: two modules have an entry of the same name.
    """
    entries: dict[str, Any] = {}
    owners: dict[str, str] = {}
    for module in modules_of(package):
        # A module without the constant has no entries.
        for name, entry in getattr(module, constant, {}).items():
            if name in entries:
                raise ConfigError(
                    f"{owners[name]} and {module.__name__} both have {name!r} in {constant}; "
                    "rename one"
                )
            entries[name] = entry
            owners[name] = module.__name__
    return MappingProxyType(entries)
