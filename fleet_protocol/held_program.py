"""Runs an external program, and ends it when standard input closes.

``python -m fleet_protocol.held_program <program> <argument>...``; it forwards SIGTERM and SIGHUP.
"""

import signal
import subprocess
import sys
from types import FrameType

from fleet_protocol.child_process import END_SECONDS, when_parent_ends


def _hold(command: list[str]) -> int:
    """Run a program until it ends, and return its exit code."""
    running: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        for program in running:
            program.send_signal(number)

    # Before the program starts: without a handler a signal would end only this process.
    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGHUP, pass_on)
    # The input stays with this process, so that it closes with the parent.
    program = subprocess.Popen(command, stdin=subprocess.DEVNULL)  # noqa: S603  (of our parent)
    running.append(program)

    def end() -> None:
        program.terminate()
        try:
            program.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            program.kill()

    when_parent_ends(end)
    return program.wait()


if __name__ == "__main__":
    sys.exit(_hold(sys.argv[1:]))
