"""Boards that take releases: a launcher that is started again whenever it ends, and a server that
is up.
"""

import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

from shoal.flash.bundle import read_part
from tests.device_runtime.device_process import REPOSITORY

PATIENCE_SECONDS = 240.0
SITE = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
SEPARATE = "\n".join([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])


def restart(agents, name):
    """Kill an agent as a power cut would, and start it again."""
    agents.processes[name].kill()
    agents.processes[name].wait(10)
    agents.start(name)


def board_of_source(folder, enrolment, data, connect_seconds=30.0):
    """A folder for `Board` whose runtime is this source and what is installed here."""
    (folder / "base/bin").mkdir(parents=True)
    (folder / "base" / SITE).mkdir(parents=True)
    (folder / "base" / SITE / "separate.pth").write_text(f"{REPOSITORY}\n{SEPARATE}\n")
    (folder / "base/pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    (folder / "base/bin/python").symlink_to(Path(sys.executable).resolve())
    (folder / "base/bin/launch").write_bytes(read_part("launch.sh"))
    (folder / "base/bin/launch").chmod(0o755)
    (folder / "device.toml").write_text(
        f'state_dir = "state"\nrepair_seconds = 0.5\nconnect_timeout_seconds = {connect_seconds}\n'
        f'[identity]\nfile = "{enrolment}"\n[data]\nkind = "npz"\npath = "{data}"\n'
    )


class Board:
    """A board whose unit starts the launcher of its `base` again whenever it ends; its files lie in
    one folder.
    """

    def __init__(self, folder):
        self.folder = folder
        self.releases = folder / "state" / "releases"
        self.codes = []
        self.starts = 0
        self.left = None  # done once, after the next end and before the next start
        self._over = threading.Event()
        self._process = None
        self._unit = threading.Thread(target=self._serve)

    def __enter__(self):
        self._unit.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self.cut()
        self._unit.join(60)

    def _serve(self):
        command = [
            self.folder / "base/bin/launch",
            self.releases,
            "device",
            "run",
            "--config",
            "device.toml",
        ]
        while not self._over.is_set():
            self.starts += 1
            with (self.folder / "log").open("ab") as log:
                self._process = subprocess.Popen(
                    list(map(str, command)),
                    cwd=self.folder,
                    env={"PATH": os.environ["PATH"]},
                    stdout=log,
                    stderr=log,
                )
                self.codes.append(self._process.wait())
            if self.codes[-1] == 2:  # the unit's RestartPreventExitStatus
                return
            left = self.left
            self.left = None
            if left is not None:
                left()
            self._over.wait(0.2)

    def cut(self):
        """A power cut."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)

    @property
    def record(self):
        with contextlib.suppress(OSError):
            return (self.releases / "record").read_text().strip()
        return "running 0 0 0"

    def log(self):
        """What it has written, nothing before its thread has started it."""
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / "log").read_text()
        return ""


def until(what, *about):
    patience = time.monotonic() + PATIENCE_SECONDS
    while not what():
        assert time.monotonic() < patience, [each() if callable(each) else each for each in about]
        threading.Event().wait(0.02)
