"""Starts modules of Shoal as processes, whatever the working folder contains.

``python -m`` searches the working folder first, so that a user's ``models.py`` there would replace
Shoal's package. These processes do not search it, and find the code that started them even if that
is not installed.
"""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

# Python 3.11 has -P for the first half of this; a board may have 3.10. Nothing is imported before
# the path is right.
_START = """\
import sys
sys.path[:] = [entry for entry in sys.path if entry]
if {root!r} not in sys.path:
    sys.path.insert(0, {root!r})
import runpy
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""
_ROOT = str(Path(__file__).resolve().parents[1])


def python_module(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module, without searching the working folder for it."""
    return [sys.executable, "-c", _START.format(root=_ROOT, module=module), *arguments]


def when_parent_ends(act: Callable[[], object]) -> None:
    """Call a function once standard input closes, which happens however the parent ends."""

    def watch() -> None:
        # Not sys.stdin, for whose lock Python would wait when it exits, and abort.
        while os.read(0, 4096):
            pass
        act()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
