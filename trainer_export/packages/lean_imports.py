"""Imports transformers without the optional packages that it does not need to build a model."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec

from fleet_protocol.allocator import lasting_objects

_OPTIONAL = frozenset({"scipy", "torchao"})
"""Transformers imports these if they are installed: to match boxes, and to quantize."""
_ASKING = "transformers"


@contextmanager
def lean_imports() -> Iterator[None]:
    """Hide optional packages from transformers, which asks whether they are installed.

    That saves a second of its import, and warnings of packages that do not fit the machine. It
    remembers the answer, so only a process that ends with the export may use this. All other
    packages, and the user's own modules, find what is installed. Collections of cycles wait until
    the end, see `lasting_objects`.
    """
    find_spec = importlib.util.find_spec

    def visible(name: str, package: str | None = None) -> ModuleSpec | None:
        asking = sys._getframe(1).f_globals.get("__name__", "")  # noqa: SLF001 - no public name
        if name in _OPTIONAL and asking.partition(".")[0] == _ASKING:
            return None
        return find_spec(name, package)

    importlib.util.find_spec = visible
    try:
        with lasting_objects():
            yield
    finally:
        importlib.util.find_spec = find_spec
