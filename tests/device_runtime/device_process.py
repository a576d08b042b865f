"""A device as a process of its own: configured, started, killed and looked at from outside."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.device_runtime.scripted_server import FLEET

REPOSITORY = Path(__file__).resolve().parents[2]
_STATE = re.compile(r"\bstate=([a-z]+)$", re.MULTILINE)


class DeviceProcess:
    """One device with its folder; it can be started more than once.

    Args:
        folder: for configuration, state and logs.
        url: of the broker.
        data: the ``[data]`` table.
        device: its id.
        python: interpreter to run it with.
        options: further keys of the configuration.
    """

    def __init__(
        self,
        folder: Path,
        url: str,
        data: dict[str, Any],
        *,
        device: str = "pi-1",
        python: str = sys.executable,
        **options: Any,
    ) -> None:
        self.folder = folder
        self.id = device
        self.state_dir = folder / "state"
        self.config = folder / "device.toml"
        self.python = python
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        settings = {
            "fleet": FLEET,
            "device": device,
            "broker": url,
            "state_dir": str(self.state_dir),
            "threads": 1,  # no trials, unless a test asks for them
            "repair_seconds": 0.5,
            "retry_seconds": 0.5,
            "connect_timeout_seconds": 20,
        } | options
        lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
        lines += ["[data]", *(f"{key} = {json.dumps(value)}" for key, value in data.items())]
        self.config.write_text("\n".join(lines) + "\n")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def log(self, start: int | None = None) -> str:
        """What a start of the device wrote, by default the last."""
        return (self.folder / f"log-{self.starts if start is None else start}").read_text()

    def states(self, start: int | None = None) -> list[str]:
        """The chain of states of a start of the device."""
        return _STATE.findall(self.log(start))

    def start(self, prefix: Sequence[str] = ()) -> None:
        """Start it.

        Args:
            prefix: a command that runs the device's command.
        """
        self.starts += 1
        command = [*prefix, self.python, "-m", "device_runtime", "--config", str(self.config)]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"}
        with (self.folder / f"log-{self.starts}").open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait_exit(self, seconds: float = 120.0) -> int:
        assert self._process is not None
        return self._process.wait(seconds)

    def wait_log(self, text: str, times: int = 1, seconds: float = 120.0) -> None:
        """Until the last start of the device has written some text so many times."""
        deadline = time.monotonic() + seconds
        while self.log().count(text) < times:
            assert self._process is not None
            try:
                code = self._process.wait(0.05)
            except subprocess.TimeoutExpired:
                code = None
            if (code is not None and self.log().count(text) < times) or time.monotonic() > deadline:
                raise AssertionError(f"no {text!r} (exit code {code}) in:\n{self.log()}")

    def kill(self) -> None:
        """A power cut."""
        self._signal(signal.SIGKILL)

    def terminate(self) -> int:
        """A polite end; returns the exit code."""
        return self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> int:
        if self._process is None:
            return 0
        if self._process.poll() is None:
            self._process.send_signal(number)
        code = self._process.wait(20)
        self._process = None
        return code
