"""Starting Python processes of our own, whatever lies in the folder they are started in.

``python -m`` looks into the working folder first: a user's ``models.py`` there would be taken for
our package. These processes do not look there, and find the code that started them also where it is
not installed.
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
    """Program and arguments that run one of our modules, as ``python -m`` would, but not from the
    working folder.
    """
    return [sys.executable, "-c", _START.format(root=_ROOT, module=module), *arguments]


def when_parent_ends(act: Callable[[], object]) -> None:
    """Do something once our standard input closes, as the parent's end of the pipe does however the
    parent ends.
    """

    def watch() -> None:
        while os.read(0, 4096):  # of sys.stdin Python would wait for the lock at its end, and abort
            pass
        act()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
