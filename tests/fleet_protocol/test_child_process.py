"""Processes of our own: they end when they want to, and when the one that started them is no
more.
"""

import subprocess
import sys

_WATCH = (
    "from fleet_protocol.child_process import when_parent_ends; when_parent_ends(lambda: "
    "print('over', flush=True));"
)


def started(then):
    return subprocess.Popen(
        [sys.executable, "-c", _WATCH + then], stdin=-1, stdout=-1, stderr=-1, text=True
    )


def test_a_child_can_end_while_its_parent_lives():
    """At once and without a crash, though something waits for the parent's end."""
    with started("") as child:
        assert child.wait(20) == 0
        assert child.stderr.read() == ""


def test_a_child_hears_of_its_parents_end():
    with started("import threading; threading.Event().wait(20)") as child:
        child.stdin.close()
        assert child.stdout.readline() == "over\n"
        child.kill()
