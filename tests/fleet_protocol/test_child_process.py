"""Processes of our own: they end when they want to, and when the one that started them is no
more.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fleet_protocol.child_process import (
    ChildProcess,
    child_module,
    child_program,
    end_children,
)

_WATCH = (
    "from fleet_protocol.child_process import when_parent_ends; when_parent_ends(lambda: "
    "print('over', flush=True));"
)
_WAIT = "import os, threading; print(os.getpid(), flush=True); threading.Event().wait(60)"
_DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {_WAIT}"


def started(then):
    return subprocess.Popen(
        [sys.executable, "-c", _WATCH + then], stdin=-1, stdout=-1, stderr=-1, text=True
    )


def runs(number):
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def eventually(condition):
    """Whether something becomes true within half a minute."""
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        threading.Event().wait(0.02)
    return condition()


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


def test_a_child_ends_when_its_input_closes():
    """It has a session of its own, so that Ctrl-C of a terminal does not reach it."""
    child = ChildProcess([sys.executable, "-c", "import sys; sys.exit(len(sys.stdin.read()) + 3)"])
    assert os.getsid(child.pid) == child.pid != os.getsid(0)
    assert child.end() == 3
    assert child.end() == 3


def test_what_does_not_end_in_time_is_killed_with_its_own_children():
    """Also a grandchild, which would otherwise keep a port."""
    text = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {_DEAF!r}]).wait()"
    child = ChildProcess([sys.executable, "-c", text], output=subprocess.PIPE)
    grandchild = int(child.stdout.readline())
    assert grandchild != child.pid
    assert child.end(0.2) == -signal.SIGKILL
    assert eventually(lambda: not runs(grandchild))


def test_children_share_one_deadline():
    children = [
        ChildProcess([sys.executable, "-c", _DEAF], output=subprocess.PIPE) for _ in range(4)
    ]
    for child in children:
        child.stdout.readline()
    began = time.monotonic()
    end_children(children, 0.5)
    assert time.monotonic() - began < 1.9
    assert {child.returncode for child in children} == {-signal.SIGKILL}


@pytest.mark.parametrize("how", ["by its input", "by SIGTERM"])
def test_a_program_that_is_not_ours_ends_with_its_parent(how):
    """Which it would not by itself; its exit code is passed on."""
    text = (
        "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); "
        f"signal.signal(signal.SIGHUP, lambda *_: print('again', flush=True)); {_WAIT}"
    )
    child = ChildProcess(child_program(sys.executable, "-c", text), output=subprocess.PIPE)
    child.stdout.readline()
    child.send_signal(signal.SIGHUP)
    assert child.stdout.readline() == b"again\n"
    if how == "by SIGTERM":
        child.terminate()
        assert child.wait(20) == 7
    assert child.end() == 7


def test_children_do_not_outlive_a_parent_that_is_killed(tmp_path):
    """Neither an agent, which does not read its input, nor a program of others."""
    module = "tests.fleet_protocol.waiting"
    files = [tmp_path / "ours", tmp_path / "theirs"]
    commands = [
        child_module(module, str(files[0])),
        child_program(sys.executable, "-m", module, str(files[1])),
    ]
    text = (
        "import threading; from fleet_protocol.child_process import ChildProcess; "
        f"children = [ChildProcess(command) for command in {commands!r}]; "
        "threading.Event().wait(60)"
    )
    with subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.DEVNULL) as parent:
        written = eventually(lambda: all(path.exists() and path.read_text() for path in files))
        numbers = [int(path.read_text()) for path in files]
        assert written
        assert all(runs(number) for number in numbers)
        parent.kill()
    assert eventually(lambda: not any(runs(number) for number in numbers))
