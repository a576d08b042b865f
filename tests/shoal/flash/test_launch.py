"""What starts a board's agent: in every phase of the record, cut short in each, and with a file
that is not one.
"""

import os
import re
import subprocess
import tarfile
import threading
import time

import pytest

from device_runtime.agent.releases import TRANSITIONS
from fleet_protocol.messages.values import RELEASE_PATTERN
from shoal.flash.bundle import read_part
from shoal.flash.tree import Entry, packed

PHASES = sorted({phase for phase, _ in TRANSITIONS} | set(TRANSITIONS.values()))
LIB = "lib/python3/site-packages"

# It says who runs; in a self-test it does as the file `test` beside it says.
PYTHON = """#!/bin/sh
case "$*" in
*--config*) echo "$0" >>"{folder}/ran" ;;
*) [ ! -e "{folder}/test" ] || . "{folder}/test" ;;
esac
"""


class Board:
    """A launcher and an interpreter that is a script."""

    def __init__(self, folder):
        self.folder = folder
        self.releases = folder / "releases"
        self.file = folder / "a file"
        (folder / "base/bin").mkdir(parents=True)
        self.releases.mkdir()
        (folder / "base/pyvenv.cfg").write_text("home = /usr/bin\n")
        for name, text in (
            ("python", PYTHON.format(folder=folder)),
            ("launch", read_part("launch.sh").decode()),
        ):
            (folder / "base/bin" / name).write_text(text)
            (folder / "base/bin" / name).chmod(0o755)
        self.file.write_bytes(packed([Entry(f"{LIB}/it.py", b"pass")]))

    def has(self, number):
        """A release that was unpacked before."""
        (self.releases / f"{number}/bin").mkdir(parents=True)
        (self.releases / f"{number}/bin/python").symlink_to(self.folder / "base/bin/python")

    def begin(self):
        command = [
            str(self.folder / "base/bin/launch"),
            str(self.releases),
            "device",
            "run",
            "--config",
            "x",
        ]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def start(self, record=None):
        """The record after a start, and who ran."""
        if record is not None:
            (self.releases / "record").write_text(record + "\n")
        process = self.begin()
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 0, said
        return self.record, self.ran[-1]

    @property
    def record(self):
        return (
            (self.releases / "record").read_text().strip()
            if (self.releases / "record").exists()
            else ""
        )

    @property
    def ran(self):
        lines = (self.folder / "ran").read_text().splitlines()
        return [line.removeprefix(f"{self.folder}/").removesuffix("/bin/python") for line in lines]


@pytest.fixture
def board(tmp_path):
    return Board(tmp_path)


def test_a_board_without_a_record_runs_what_it_was_made_with(board):
    """Also where the record is damaged, or the release that it names is gone."""
    assert board.start() == ("", "base")
    assert board.start("\0\0\0\0")[1] == "base"
    assert board.start("running 7 3 0")[1] == "base"


@pytest.mark.parametrize("script", ["launch.sh", "shoal.sh"])
def test_a_python_that_is_gone_is_named(board, script):
    """As a newer system leaves it; the agent is not started again and again (exit code 2)."""
    python = board.folder / "base/bin/python"
    python.unlink()
    python.symlink_to("/usr/bin/python3.1")
    (board.folder / "base/bin/it").write_text(read_part(script).decode())
    command = [
        "sh",
        board.folder / "base/bin/it",
        *([board.releases] if script == "launch.sh" else []),
        "device",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "error: /usr/bin/python3.1 is gone" in done.stderr) == (2, True), (
        done.stderr
    )
    assert "as `python` in flash.toml" in done.stderr


def test_a_release_is_unpacked_tested_and_on_trial(board):
    """Beside the one before, which stays; older ones and the file go."""
    for number in (2, 3):
        board.has(number)
    assert board.start(f"fetched 7 3 0 {board.file}") == ("trial 7 3 1", "releases/7")
    assert (board.releases / "7" / LIB / "it.py").read_text() == "pass"
    assert not board.file.exists()
    assert board.start("running 7 3 0")[1] == "releases/7"
    assert sorted(path.name for path in board.releases.iterdir()) == ["3", "7", "record"]


@pytest.mark.parametrize(
    ("test", "why"),
    [
        ("echo much; echo 'ImportError: no numpy' >&2", "ImportError: no numpy"),
        (
            (
                "printf 'Traceback\\n  x\\nImportError: no blas\\n\\nImportError: no numpy,\\n  "
                "relaunch it'"
            ),
            "ImportError: no blas",
        ),
        ("echo a; echo the loss stays", "the loss stays"),
        ("true", "it printed nothing"),
    ],
)
def test_a_self_test_that_fails_is_told_and_the_one_before_runs(board, test, why):
    """With the first error of a chain, which is the cause, or the last line of what it said."""
    board.has(3)
    (board.folder / "test").write_text(f"{test}; exit 1")
    record, ran = board.start(f"fetched 7 3 0 {board.file}")
    assert (record, ran) == (f"failed 7 3 0 its self-test failed: {why}", "releases/3")
    assert sorted(path.name for path in board.releases.iterdir()) == ["3", "record"]


def test_a_trial_that_ends_three_times_is_over(board):
    """The launcher counts, as what it starts may not come so far."""
    for number in (3, 7):
        board.has(number)
    assert [
        board.start("trial 7 3 0" if first else None)[1] for first in (True, False, False, False)
    ] == [
        *["releases/7"] * 3,
        "releases/3",
    ]
    assert board.record == "failed 7 3 0 it ended 3 times before the fleet had heard it"


@pytest.mark.attack(
    "file",
    "A release would unpack files outside its folder, or contains links",
    "the board refuses it and writes nothing",
    "2026-11-23",
)
@pytest.mark.parametrize("kind", ["above", "absolute", "link", "hard", "owner", "noise", "cut"])
def test_a_file_that_is_not_one_writes_nothing(board, kind):
    """Though its operator signed it: no path out of the folder, no links, no damage."""
    info = tarfile.TarInfo(
        {
            "above": f"{LIB}/../../../../out",
            "absolute": f"{board.folder}/out",
            "owner": "bin/elsewhere",
        }.get(kind, f"{LIB}/x")
    )
    if kind == "owner":  # a list of the members shows it as columns
        info.uname = f"0 0 2026-11-28 00:00 {LIB}"
    info.type = {"link": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE}.get(kind, tarfile.REGTYPE)
    info.linkname = "/etc/passwd"
    with tarfile.open(board.file, "w:gz") as archive:
        archive.addfile(info)
    if kind in {"noise", "cut"}:
        whole = packed([Entry(f"{LIB}/it.py", os.urandom(10_000))])
        board.file.write_bytes(os.urandom(1000) if kind == "noise" else whole[: len(whole) // 2])
    record, ran = board.start(f"fetched 7 0 0 {board.file}")
    assert record.startswith("failed 7 0 0 it ")
    assert ran == "base"
    assert not (board.folder / "out").exists()
    assert [path.name for path in board.releases.iterdir()] == ["record"]


@pytest.mark.parametrize("phase", PHASES)
def test_a_power_cut_in_any_phase_leaves_a_board_that_runs(board, phase):
    """Killed in the self-test, or while its runtime runs; at the next start somebody runs, and the
    record is one.
    """
    for number in (3, 7):
        board.has(number)
    (board.folder / "test").write_text('touch "$(dirname "$0")/../../here"; sleep 60')
    (board.releases / "record").write_text(
        f"{phase} 7 3 0{f' {board.file}' if phase == 'fetched' else ''}\n"
    )
    process = board.begin()
    there = board.releases / "here" if phase == "fetched" else board.folder / "ran"
    patience = time.monotonic() + 120
    while not there.exists():
        assert time.monotonic() < patience
        threading.Event().wait(0.01)
    process.kill()
    process.communicate(timeout=120)
    (board.folder / "test").unlink()
    record, ran = board.start()
    assert re.match(RELEASE_PATTERN, record)
    assert record.split(" ")[0] == {"fetched": "trial"}.get(phase, phase)
    assert ran == ("releases/3" if phase == "failed" else "releases/7")


def test_a_self_test_that_takes_the_board_down_is_not_tried_for_ever(board):
    """Three times cut short in it: the one before stays."""
    assert board.start(f"fetched 7 0 3 {board.file}") == (
        "failed 7 0 0 its self-test took this board down 3 times",
        "base",
    )
