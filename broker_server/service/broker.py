"""A broker that the server starts, in a child process that ends with the server.

The child has its own session: Ctrl-C in a terminal reaches only the server, which says goodbye to
the fleet and then stops the broker.
"""

import contextlib
import errno
import socket
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path

from typing_extensions import Self

from fleet_protocol.child_process import ChildProcess
from fleet_protocol.errors import ConfigError, TransportError
from fleet_protocol.transport import bracket_host

_DYING_SECONDS = 1.0

MAX_PAYLOAD_BYTES = 16 * 1024 * 1024
START_SECONDS = 15.0
PROBE_SECONDS = 0.05
_STOP_SECONDS = 5.0


class ChildBroker(ABC):
    """A broker in a child process that ends with the server.

    Args:
        folder: folder for its configuration and log.
        port: port that it listens on.
        listen: address that it listens on.
    """

    scheme = "mqtt"
    """The scheme of its address."""

    def __init__(self, folder: Path, *, port: int = 1883, listen: str = "127.0.0.1") -> None:
        self.port = port
        self.listen = listen
        self._folder = folder
        self._process: ChildProcess | None = None
        # Reentrant: a restart ends and starts the process under the same lock.
        self._changing = threading.RLock()
        self._restarted = False

    @property
    def url(self) -> str:
        """The address for clients on this machine."""
        return f"{self.scheme}://{bracket_host(self._host)}:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether the child process runs and listens."""
        return (
            # A process that does not listen yet is not alive for clients.
            self._process is not None
            and self._process.poll() is None
            and accepts_connections(self._host, self.port)
        )

    @property
    def pid(self) -> int | None:
        """The child process, if there is one."""
        return self._process.pid if self._process is not None else None

    @property
    def _host(self) -> str:
        # A broker that listens everywhere is reached over loopback.
        return "127.0.0.1" if self.listen in {"0.0.0.0", "::", ""} else self.listen  # noqa: S104

    def start(self) -> None:
        """Start, and return when connections are accepted.

        Raises:
            ConfigError: the broker is not installed, or it cannot listen on its address.
            TransportError: the port is taken, the address does not exist (yet), or the broker does
                not start.
        """
        command = self._command()
        self._check_port()
        log = self._folder / "broker.log"
        with log.open("ab") as output:
            self._process = ChildProcess(command, output=output, errors=output)
        self._wait_until_listening(log)

    @abstractmethod
    def _command(self) -> list[str]:
        """Write the configuration, and return a command that ends when its input closes.

        Raises:
            ConfigError: the broker is not installed.
        """

    def _check_port(self) -> None:
        with socket.socket(socket.AF_INET6 if ":" in self.listen else socket.AF_INET) as probe:
            # A port of a broker that has just ended counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.listen, self.port))
            except PermissionError as error:
                raise ConfigError(
                    f"port {self.port} requires root; choose one above 1023 in [broker] port"
                ) from error
            except OSError as error:
                if accepts_connections(self._host, self.port):
                    raise TransportError(
                        f"port {self.port} on {self.listen} is taken, probably by another "
                        f'broker: stop that one, use it with [broker] url = "{self.url}", or '
                        "choose another [broker] port"
                    ) from error
                # After a power cut the address may appear only with the network.
                is_away = error.errno == errno.EADDRNOTAVAIL
                kind = TransportError if is_away else ConfigError
                raise kind(
                    f"cannot listen on {self.listen}:{self.port}: {error.strerror}"
                ) from error

    def _wait_until_listening(self, log: Path) -> None:
        process = self._process
        deadline = time.monotonic() + START_SECONDS
        while process is not None and not accepts_connections(self._host, self.port):
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(PROBE_SECONDS)
                raise TransportError(f"the broker ended with exit code {code}; see {log}")
            if time.monotonic() > deadline:
                # Not `stop`, which may wait for the thread that calls this.
                self._end_process(_STOP_SECONDS)
                raise TransportError(f"the broker does not listen on port {self.port}; see {log}")

    def restart(self) -> None:
        """Restart the broker; the next call of `ensure` reports that.

        Raises:
            ConfigError: see `start`.
            TransportError: see `start`.
        """
        with self._changing:
            self._restarted = True
            self._end_process(_STOP_SECONDS)
            self.start()

    def ensure(self) -> bool:
        """Restart the broker if it has died.

        Returns:
            Whether it was restarted, now or since the last call.

        Raises:
            ConnectionError: it does not start. This ends no run, because another program may have
                taken its port.
        """
        with self._changing:
            restarted = self._restarted
            self._restarted = False
            if self._process is not None:
                # When a process dies, its connections close a moment before it is gone.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_DYING_SECONDS)
                if self._process.poll() is None:
                    return restarted
            # Also if it never started: then nothing is ended.
            self._end_process(_STOP_SECONDS)
            try:
                self.start()
            except (TransportError, ConfigError) as error:
                raise ConnectionError(str(error)) from error
            return True

    def stop(self, timeout_seconds: float = _STOP_SECONDS) -> None:
        """Stop it and free the port; may be called repeatedly."""
        self._end_process(timeout_seconds)

    def _end_process(self, timeout_seconds: float) -> None:
        with self._changing:
            process = self._process
            self._process = None
            if process is not None:
                process.end(timeout_seconds)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def accepts_connections(host: str, port: int) -> bool:
    """Return whether a process listens at an address."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection((host, port), timeout=0.5),
    ):
        return True
    return False
