"""A broker that the server starts, in a child process that dies with it.

The child has a session of its own: Ctrl-C in a terminal reaches the server, which says goodbye to
the fleet, and only then stops the broker.
"""

import contextlib
import errno
import math
import os
import socket
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import Self

from fleet_protocol.errors import ConfigError, TransportError
from fleet_protocol.transport import bracket_host

_DYING_SECONDS = 1.0
_LOOK_SECONDS = 1.0

MAX_PAYLOAD_BYTES = 16 * 1024 * 1024
START_SECONDS = 15.0
PROBE_SECONDS = 0.05
_MOST_LOG_BYTES = 4 * 1024 * 1024  # strangers write into it, too

# Nothing bounds how much rumqttd keeps: it is started again when it has grown by so much since it
# settled.
_MOST_GROWN_BYTES = 512 * 1024 * 1024
_SETTLING_SECONDS = 600.0


@dataclass(frozen=True)
class Gate:
    """How a broker lets members in, and nobody else.

    Attributes:
        certificate: file of its certificate, in PEM.
        key: file of its key.
        authority: file of the certificate that vouches for members.
        withdrawn: file of the list of certificates that count for nothing any more.
        logins: returns names and passwords; called whenever the broker starts, and every second.
    """

    certificate: Path
    key: Path
    authority: Path
    withdrawn: Path
    logins: Callable[[], Mapping[str, str]]


class ChildBroker(ABC):
    """A broker in a child process that dies with us.

    Args:
        folder: of its configuration and log.
        port: that it listens on.
        listen: address that it listens on.
        gate: lets members in; without it there are neither passwords nor encryption.
    """

    def __init__(
        self,
        folder: Path,
        *,
        port: int = 1883,
        listen: str = "127.0.0.1",
        gate: Gate | None = None,
    ) -> None:
        self.port = port
        self.listen = listen
        self._gate = gate
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._changing = threading.RLock()
        self._renewed = False

    @property
    def url(self) -> str:
        """The address for clients on this machine."""
        return f"mqtt{'s' if self._gate else ''}://{bracket_host(self._host)}:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether the child process runs and listens."""
        return (
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
        return "127.0.0.1" if self.listen in {"0.0.0.0", "::", ""} else self.listen  # noqa: S104

    def start(self) -> None:
        """Start, and return when connections are accepted.

        Raises:
            ConfigError: the broker is not installed, or its address cannot be listened on.
            TransportError: the port is taken, the address is not there (yet), or the broker does
                not come up.
        """
        logins = None if self._gate is None else self._gate.logins()
        command = self._command()
        self._check_port()
        log = self._folder / "broker.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603  (our own module, arguments are ours)
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._wait_until_listening(log)
        watch = threading.Thread(
            target=self._watch,
            args=(self._process, logins),
            name="broker-watch",
            daemon=True,
        )
        watch.start()

    def _watch(self, process: "subprocess.Popen[bytes]", logins: Mapping[str, str] | None) -> None:
        """Start the broker again when it must be, until its process ends.

        That is when its members are others, as brokers read them when they start; when it has
        grown large; and when it lets nobody in any more, after a panic under its lock, as of a
        client's name with a plus sign.

        Args:
            process: the broker.
            logins: of the members that it was started with.
        """
        settled_at = time.monotonic() + _SETTLING_SECONDS
        most_bytes = math.inf
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_SECONDS)
                return
            # What cannot be done now is tried again by the next call of `ensure`, which says why.
            with contextlib.suppress(ConfigError, TransportError, OSError):
                size = resident_bytes(process.pid)
                if time.monotonic() < settled_at:  # a large fleet that comes is no growth
                    most_bytes = size + _MOST_GROWN_BYTES
                is_broken = self._check_log()
                has_others = self._gate is not None and self._gate.logins() != logins
                if is_broken or size > most_bytes or has_others:
                    self._restart(process)
                    return

    def _check_log(self) -> bool:
        """Return whether the log tells of a panic; empty it then, or where it is long."""
        log = self._folder / "broker.log"
        text = log.read_bytes() if log.exists() else b""
        is_broken = b"PoisonError" in text
        if is_broken or len(text) > _MOST_LOG_BYTES:
            os.truncate(log, 0)
        return is_broken

    def _restart(self, process: "subprocess.Popen[bytes]") -> None:
        with self._changing:
            if self._process is process:
                self._renewed = True
                self.stop()
                self.start()

    @abstractmethod
    def _command(self) -> list[str]:
        """Write the configuration, and return the command, which ends when its input closes.

        Raises:
            ConfigError: the broker is not installed.
        """

    def _check_port(self) -> None:
        with socket.socket(socket.AF_INET6 if ":" in self.listen else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.listen, self.port))
            except PermissionError as error:
                raise ConfigError(
                    f"port {self.port} needs root; choose one above 1023 in [broker] port"
                ) from error
            except OSError as error:
                if accepts_connections(self._host, self.port):
                    raise TransportError(
                        f"port {self.port} on {self.listen} is taken, probably by another broker: "
                        f'stop that one, use it with [broker] url = "{self.url}", or choose '
                        "another [broker] port"
                    ) from error
                # An address may come with the network, after a power cut.
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
                raise TransportError(f"the broker ended with {code}; see {log}")
            if time.monotonic() > deadline:
                self.stop()
                raise TransportError(f"the broker does not listen on port {self.port}; see {log}")

    def ensure(self) -> bool:
        """Start the broker again if it has died.

        Returns:
            Whether it had to be started, now or since the last call.

        Raises:
            ConnectionError: it does not come up. This ends no run, as another program may have its
                port.
        """
        with self._changing:
            renewed = self._renewed
            self._renewed = False
            if self._process is not None:
                # Its connections are closed a moment before a process that dies is gone.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_DYING_SECONDS)
                if self._process.poll() is None:
                    return renewed
            self.stop()
            try:
                self.start()
            except (TransportError, ConfigError) as error:
                raise ConnectionError(str(error)) from error
            return True

    def stop(self, timeout_seconds: float = 5.0) -> None:
        """Stop it and free the port; stopping twice is no error."""
        with self._changing:
            process = self._process
            self._process = None
            if process is None:
                return
            if process.stdin is not None:
                process.stdin.close()  # iotcore's own way out waits for connections that are open
            process.terminate()
            try:
                process.wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout_seconds)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process, 0 where the system does not report it."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def accepts_connections(host: str, port: int) -> bool:
    """Return whether something listens at an address."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection((host, port), timeout=0.5),
    ):
        return True
    return False
