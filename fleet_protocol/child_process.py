"""Starts processes that end when the process that started them ends.

The child detects the parent's end by its standard input, a pipe that the system closes however the
parent ends.

``python -m`` searches the working folder first, so that a user's ``models.py`` there would replace
Shoal's package. Modules that start here do not search it, and find the code that started them even
if that is not installed.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from typing_extensions import override

END_SECONDS = 10.0
"""How long a child may take to end before it is killed."""

# Python 3.11 has -P for the first half of this; a board may have 3.10. Nothing is imported before
# the path is right.
_START = """\
import sys
sys.path[:] = [entry for entry in sys.path if entry]
if {root!r} not in sys.path:
    sys.path.insert(0, {root!r})
{before}import runpy
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""
_WATCH = """\
from fleet_protocol.child_process import terminate_with_parent
terminate_with_parent()
"""
_ROOT = str(Path(__file__).resolve().parents[1])


def python_module(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module, without searching the working folder for it."""
    return [sys.executable, "-c", _START.format(root=_ROOT, before="", module=module), *arguments]


def child_module(module: str, *arguments: str) -> list[str]:
    """Return the command for a module that does not read its input: it ends as if by SIGTERM."""
    text = _START.format(root=_ROOT, before=_WATCH, module=module)
    return [sys.executable, "-c", text, *arguments]


def child_program(program: str, *arguments: str) -> list[str]:
    """Return the command for an external program, which does not end with its input."""
    return python_module("fleet_protocol.held_program", program, *arguments)


def when_parent_ends(act: Callable[[], object]) -> None:
    """Call a function once standard input closes, which happens however the parent ends."""

    def watch() -> None:
        # Not sys.stdin: Python would wait for its lock when it exits, and abort.
        while os.read(0, 4096):
            pass
        act()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def terminate_with_parent() -> None:
    """End this process as if by SIGTERM, which it may handle, once its parent has ended."""
    when_parent_ends(lambda: os.kill(os.getpid(), signal.SIGTERM))


class ChildProcess(subprocess.Popen[bytes]):
    """A process that this process starts, watches and ends, and that does not outlive it.

    It has its own session: Ctrl-C in a terminal reaches only this process, which ends its children
    in the right order.

    Args:
        command: the command; the process must end when its standard input closes, like receivers
            and workers, which read their orders there, and commands of `child_module` and
            `child_program`.
        output: destination of its standard output, as in ``subprocess``; None for that of this
            process.
        errors: destination of its standard error.
        environment: its variables; None for those of this process.
        bufsize: buffer size of the pipes to it, as in ``subprocess``.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        output: IO[bytes] | int | None = None,
        errors: IO[bytes] | int | None = None,
        environment: Mapping[str, str] | None = None,
        bufsize: int = -1,
    ) -> None:
        super().__init__(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
            env=environment,
            bufsize=bufsize,
            start_new_session=True,
        )

    def request_end(self) -> None:
        """Close its standard input, which ends it; may be called repeatedly."""
        if self.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.stdin.close()

    def end(self, timeout_seconds: float = END_SECONDS) -> int:
        """Let it end, and return its exit code; may be called repeatedly.

        If it has not ended in time, it is killed with all processes of its session.
        """
        self.request_end()
        try:
            code = self.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            # It has not been waited for, so its number is still that of its group.
            os.killpg(self.pid, signal.SIGKILL)
            code = self.wait(END_SECONDS)
        if self.stdout is not None:
            self.stdout.close()
        return code

    @override
    def __exit__(self, *_: object) -> None:
        self.end()


def end_children(children: Iterable[ChildProcess], timeout_seconds: float = END_SECONDS) -> None:
    """End children in parallel, within one deadline."""
    waiting = list(children)
    for child in waiting:
        child.request_end()
    deadline = time.monotonic() + timeout_seconds
    for child in waiting:
        child.end(max(0.1, deadline - time.monotonic()))
