"""Real brokers for tests: on 127.0.0.1, on a free port, and able to die and come back on that
port.
"""

import contextlib
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from broker_server.service.embedded_broker import EmbeddedBroker

__all__ = [
    "TestBroker",
    "any_broker",
    "embedded_broker",
    "free_port",
    "mosquitto_broker",
    "needs_mosquitto",
    "without_mosquitto",
]

START_SECONDS = 60.0

_MOSQUITTO = """
listener {port} 127.0.0.1
allow_anonymous {anonymous}
user root
{persistence}
max_queued_messages 0
log_type error
log_type warning
"""


# Written after every second change: what came since is lost when the broker is killed.
_PERSISTENT = """persistence true
persistence_location {}/
autosave_on_changes true
autosave_interval 2"""


class TestBroker(Protocol):
    """A broker under a test's control.

    Attributes:
        port: where it listens, also after a restart.
    """

    __test__ = False
    port: int

    def start(self) -> None:
        """Listen; returns when connections are accepted."""

    def stop(self) -> None:
        """Die at once; sessions and retained messages are lost."""

    @property
    def url(self) -> str:
        """Address for a configuration."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on.

    It is drawn at random from below those that systems give to outgoing connections: tests that run
    side by side have many of these, and one could take the port before the broker does.
    """
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def _listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.2):
        return True
    return False


class _ProcessBroker:
    """A broker that is one child process."""

    def __init__(self, command: list[str], port: int, log: Path) -> None:
        self.port = port
        self._command = command
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        deadline = time.monotonic() + START_SECONDS
        while not _listening(self.port):
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(0.05)
                raise RuntimeError(
                    f"{self._command[0]} exited with {code}: {self._log.read_text()}"
                )
            if time.monotonic() > deadline:
                self.stop()
                raise TimeoutError(f"{self._command[0]} does not listen on {self.port}")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None


def _mosquitto() -> str | None:
    return shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")


without_mosquitto = pytest.mark.skipif(_mosquitto() is None, reason="mosquitto is not installed")
"""Leaves tests out where there is none."""


def needs_mosquitto() -> str:
    """Return the path of the installed Mosquitto; the test is skipped where there is none."""
    program = _mosquitto()
    if program is None:
        pytest.skip("mosquitto is not installed")
    return program


@contextlib.contextmanager
def mosquitto_broker(
    tmp_path: Path, *, persistent: bool = False, more: str = "", anonymous: bool = True
) -> Iterator[TestBroker]:
    """A running Mosquitto; the test is skipped where it is not installed.

    Args:
        tmp_path: for its files.
        persistent: sessions are written to disk now and then, so that a restart brings old ones
            back.
        more: lines for its configuration.
        anonymous: whether it lets in who has no login.
    """
    program = needs_mosquitto()
    port = free_port()
    config = tmp_path / f"mosquitto-{port}.conf"
    config.write_text(
        _MOSQUITTO.format(
            port=port,
            anonymous=str(anonymous).lower(),
            persistence=_PERSISTENT.format(tmp_path) if persistent else "persistence false",
        )
        + more
    )
    broker = _ProcessBroker([program, "-c", str(config)], port, tmp_path / f"mosquitto-{port}.log")
    broker.start()
    try:
        yield broker
    finally:
        broker.stop()


@contextlib.contextmanager
def embedded_broker(tmp_path: Path) -> Iterator[TestBroker]:
    """A running embedded broker, the server's own."""
    pytest.importorskip("iotcore", reason="the embedded broker needs the extra `broker`")
    port = free_port()
    with EmbeddedBroker(tmp_path / f"embedded-{port}", port=port) as broker:
        yield broker


def any_broker(tmp_path: Path) -> contextlib.AbstractContextManager[TestBroker]:
    """A running broker, whichever; Mosquitto costs a tenth of the embedded one, where it is
    installed.
    """
    return (mosquitto_broker if _mosquitto() else embedded_broker)(tmp_path)
