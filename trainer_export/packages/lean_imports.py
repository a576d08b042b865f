"""Imports packages without the optional packages that they do not need to build a model."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec

_OPTIONAL = frozenset({"scipy", "torchao"})
"""Transformers imports these if they are installed: to match boxes, and to quantize."""


@contextmanager
def lean_imports() -> Iterator[None]:
    """Hide optional packages from packages that ask whether they are installed.

    That saves a second of each import of transformers, and warnings of packages that do not fit the
    machine. A package remembers the answer, so only a process that ends with the export may use
    this. A package that imports another one without asking gets it as always.
    """
    find_spec = importlib.util.find_spec

    def visible(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name in _OPTIONAL else find_spec(name, package)

    importlib.util.find_spec = visible
    try:
        yield
    finally:
        importlib.util.find_spec = find_spec
