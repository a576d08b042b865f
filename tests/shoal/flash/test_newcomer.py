"""The way of docs/emulated-board.md from a clone to a board that trains: counted, and gone with an emulated board,
line by line.
"""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.brokers import free_port
from tests.documents.typed import ROOT, lines_of
from tests.shoal.flash.emulated import FIRMWARE
from tests.shoal.flash.mirror import needs_mirror

SHOAL = [sys.executable, "-m", "shoal"]
BOOT = "sh emulate.sh pi-1.img"
SECONDS = 3600.0  # an emulated processor beside other work


def commands() -> list[str]:
    """The lines of the section, in their order."""
    page = (ROOT / "docs" / "emulated-board.md").read_text()
    section = page.split("## Boot the board\n")[1].split("\n## ")[0]
    return [line.text for line in lines_of("docs/emulated-board.md", section)]


def test_six_commands_lead_to_a_board_that_trains():
    """Each line is one; the last of the way switches the board on, and comes once more after the
    power cut.
    """
    said = commands()
    assert said.index(BOOT) < 6
    assert said.count(BOOT) == 2
    assert not [line for line in said if {"&&", "||", ";", "|"} & set(shlex.split(line))]


def test_what_make_installs_is_what_the_way_needs():
    """Every program of a card, by the package that brings it, and those of the emulated board."""
    recipe = (ROOT / "Makefile").read_text().partition("card-tools:\n")[2].partition("\n\n")[0]
    tools = [
        line.split() for line in (ROOT / "shoal/flash/files/card.tools").read_text().splitlines()
    ]
    for tool, package in [*tools, ["qemu-system-aarch64", "qemu-system-arm"]]:
        assert package in {"apt", "dpkg", "mawk", *recipe.split()}, (
            tool
        )  # these three every Debian has


class Way:
    """The folder that the reader is in, and what runs in other terminals."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        self.folder = folder
        self.port = free_port()
        self.server: subprocess.Popen[bytes] | None = None
        self.board: subprocess.Popen[bytes] | None = None
        self.said = ""

    def go(self, line: str) -> None:
        """Type a line of the section."""
        words = shlex.split(line)
        if line == BOOT:
            self.board = self._beside(["sh", "emulate.sh", words[-1]], "board.log")
        elif words[:2] == ["shoal", "run"]:
            self.server = self._beside([*SHOAL, *words[1:]], "run.log")
        elif words[0] == "cd":
            self.folder = self.root / words[1]
        elif words[0] == "make":
            place = self.root / "examples" / "board"
            made = [
                f"VENV={Path(sys.executable).parents[1]}",
                f"BOARD={place}",
                f"BOARD_OPTIONS=--port {self.port}",
            ]
            self._done(["make", "-C", str(ROOT), "-o", "install", *words[1:], *made])
        elif words[0] == "shoal":
            self._done([*SHOAL, *words[1:]])
        else:
            assert line == "source .venv/bin/activate"  # the environment that this test runs in

    def trains(self) -> bool:
        """Whether `shoal devices` says so of the board; until the server is up there is no store to
        look at.
        """
        if (self.folder / "lab" / "store" / "shoal.db").exists():
            self._done([*SHOAL, "devices", "--store", "lab/store", "--json"])
            return [each["device.state"] for each in json.loads(self.said)] == ["training"]
        return False

    def until(self, condition, what: str) -> None:
        deadline = time.monotonic() + SECONDS
        assert self.server is not None
        while not condition():
            assert self.server.poll() is None, self._log("run.log")
            assert time.monotonic() < deadline, f"no {what}: {self._log('board.log')}"
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.server.wait(2)

    def lose_power(self) -> None:
        if self.board is not None:
            os.killpg(self.board.pid, signal.SIGKILL)
            self.board.wait(30)

    def end(self) -> None:
        self.lose_power()
        if self.server is not None and self.server.poll() is None:
            self.server.terminate()
            self.server.wait(60)

    def _beside(self, command, log: str) -> "subprocess.Popen[bytes]":
        with (self.folder / log).open("ab") as file:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def _done(self, command) -> None:
        done = subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, timeout=1800, check=False
        )
        self.said = done.stdout
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"

    def _log(self, name: str) -> str:
        return (self.folder / name).read_text(errors="replace")[-3000:]


@pytest.mark.arm
@pytest.mark.timeout(3 * SECONDS)
@needs_mirror
@pytest.mark.skipif(
    not shutil.which("qemu-system-aarch64") or not FIRMWARE.exists(), reason="qemu is not installed"
)
def test_the_way_of_the_readme(tmp_path):
    """Build, boot, see it among the devices, train, pull the power, boot, finish the round, read
    the merged weights.
    """
    torch = pytest.importorskip("torch")
    shutil.copytree(
        ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("lab", "*.img*")
    )
    way = Way(tmp_path)
    lines = commands()
    again = len(lines) - 1 - lines[::-1].index(BOOT)
    began = time.monotonic()
    try:
        for number, line in enumerate(lines):
            if number == again:
                way.lose_power()
            way.go(line)
            print(f"{time.monotonic() - began:6.0f} s  {line}")
            if line == BOOT and number != again:
                way.until(way.trains, "board that trains")
                print(f"{time.monotonic() - began:6.0f} s  it trains")
            if number == again:
                assert way.server is not None
                assert way.server.wait(SECONDS) == 0, (way.folder / "run.log").read_text()
                print(f"{time.monotonic() - began:6.0f} s  the run has ended")
    finally:
        way.end()
    said = (way.folder / "run.log").read_text()
    assert "finished after 3 rounds" in said
    merged = torch.load(way.folder / "pi-1.pt", weights_only=True)
    assert all(
        bool(torch.isfinite(value).all()) for value in merged.values() if hasattr(value, "isfinite")
    )
