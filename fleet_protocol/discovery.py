"""Finds what the modules of a folder offer, so that a new one is a new file and no list repeats its
name.
"""

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

from fleet_protocol.errors import ConfigError


def modules_of(package: str) -> Iterator[ModuleType]:
    """Import the modules that lie directly in a package, by name.

    Not those that run as a program (``__main__``).
    """
    path = importlib.import_module(package).__path__
    for name in sorted(found.name for found in pkgutil.iter_modules(path)):
        if name != "__main__":
            yield importlib.import_module(f"{package}.{name}")


def discover(package: str, constant: str) -> Mapping[str, Any]:
    """Join the mappings that the modules of a package have as one constant, if they have it, in
    order of their names.

    Example:
        >>> list(discover("broker_server.strategies", "STRATEGIES"))[:2]
        ['fedavg', 'fedmedian']

    Raises:
        ConfigError: two modules have an entry of the same name.
    """
    found: dict[str, Any] = {}
    owners: dict[str, str] = {}
    for module in modules_of(package):
        for name, entry in getattr(module, constant, {}).items():
            if name in found:
                raise ConfigError(
                    f"{owners[name]} and {module.__name__} both have {name!r} in {constant}; rename one"
                )
            found[name], owners[name] = entry, module.__name__
    return MappingProxyType(found)
