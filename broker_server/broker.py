"""The embedded MQTT broker: rumqttd from the iotcore wheel, in a child process that dies with us.

Run as a module it is that child: ``python -m broker_server.broker <file.toml>`` serves until its standard input closes,
so the broker never outlives its server, however the server ends. It has a session of its own: Ctrl-C in a terminal
reaches the server, which says goodbye to the fleet, and only then stops the broker.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from typing_extensions import Self

from fleet_protocol.errors import ConfigError, TransportError

__all__ = ["EmbeddedBroker"]

MAX_PAYLOAD_BYTES = 16 * 1024 * 1024
START_SECONDS = 15.0
PROBE_SECONDS = 0.05

# rumqttd keeps a log in memory for every topic filter that was ever subscribed to, so for every blob, and never frees
# it: the product of the two is the most one filter may hold. A reader that falls further behind loses chunks and asks
# for them again.
_SEGMENT_BYTES = 1024 * 1024
_SEGMENTS = 8

_CONFIG = """\
id = 0

[router]
id = 0
max_connections = 10010
max_outgoing_packet_count = 200
max_segment_size = {segment_bytes}
max_segment_count = {segments}

[v5.1]
name = "v5"
listen = "{listen}:{port}"
next_connection_delay_ms = 1

    [v5.1.connections]
    connection_timeout_ms = 60000
    max_payload_size = {max_payload_bytes}
    max_inflight_count = 100
    dynamic_filters = true
"""


class EmbeddedBroker:
    """A broker without passwords or encryption, meant for one machine or a trusted network.

    Args:
        folder: where its configuration and log are written; it is made.
        port: TCP port.
        listen: address to listen on; ``0.0.0.0`` lets boards on the network in.
    """

    def __init__(self, folder: Path, *, port: int = 1883, listen: str = "127.0.0.1") -> None:
        self.port = port
        self.listen = listen
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The address for clients on this machine."""
        return f"mqtt://{self._host}:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether the child process runs and listens."""
        return self._process is not None and self._process.poll() is None and _answers(self._host, self.port)

    @property
    def pid(self) -> int | None:
        """The child process, if there is one."""
        return self._process.pid if self._process is not None else None

    @property
    def _host(self) -> str:
        return "127.0.0.1" if self.listen in {"0.0.0.0", "::", ""} else self.listen  # noqa: S104  (compared, not bound)

    def start(self) -> None:
        """Start, and return when connections are accepted.

        Raises:
            ConfigError: the wheel with the broker is not installed, or its address cannot be listened on.
            TransportError: the port is taken, or the broker does not come up.
        """
        if importlib.util.find_spec("iotcore") is None:
            raise ConfigError(
                "the embedded broker needs the package iotcore: pip install 'shoal[broker]', "
                'or name a broker of your own with [broker] url = "mqtt://host:1883"'
            )
        self._check_port()
        self._folder.mkdir(parents=True, exist_ok=True)
        config, log = self._folder / "broker.toml", self._folder / "broker.log"
        config.write_text(
            _CONFIG.format(
                listen=self.listen,
                port=self.port,
                segment_bytes=_SEGMENT_BYTES,
                segments=_SEGMENTS,
                max_payload_bytes=MAX_PAYLOAD_BYTES,
            )
        )
        with log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603  (our own module, arguments are ours)
                [sys.executable, "-m", "broker_server.broker", str(config)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._wait_until_listening(log)

    def _check_port(self) -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.listen, self.port))
            except PermissionError as error:
                raise ConfigError(f"port {self.port} needs root; choose one above 1023 in [broker] port") from error
            except OSError as error:
                if _answers(self._host, self.port):
                    raise TransportError(
                        f"port {self.port} on {self.listen} is taken, probably by another broker: stop that one, "
                        f'use it with [broker] url = "{self.url}", or choose another [broker] port'
                    ) from error
                raise ConfigError(f"cannot listen on {self.listen}:{self.port}: {error.strerror}") from error

    def _wait_until_listening(self, log: Path) -> None:
        process = self._process
        deadline = time.monotonic() + START_SECONDS
        while process is not None and not _answers(self._host, self.port):
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(PROBE_SECONDS)
                raise TransportError(f"the embedded broker ended with {code}; see {log}")
            if time.monotonic() > deadline:
                self.stop()
                raise TransportError(f"the embedded broker does not listen on port {self.port}; see {log}")

    def ensure(self) -> bool:
        """Start it again if it has died.

        Returns:
            True if it had to be started.

        Raises:
            TransportError: it does not come up.
        """
        if self._process is not None and self._process.poll() is None:
            return False
        self.stop()
        self.start()
        return True

    def stop(self, timeout_seconds: float = 5.0) -> None:
        """Stop it and free the port; stopping twice is no error.

        Args:
            timeout_seconds: how long to wait before it is killed.
        """
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout_seconds)
        if process.stdin is not None:
            process.stdin.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=0.5):
        return True
    return False


def _exit_with_parent() -> None:
    sys.stdin.buffer.read()  # ends when the parent closes the pipe, by intention or by dying
    os._exit(0)


def _serve(config: str) -> None:
    import iotcore  # noqa: PLC0415  (an optional package, and only the child needs it)

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # rumqttd reports each packet inside an error span, which would arrive here as an error each.
    logging.getLogger("rumqttd").setLevel(logging.CRITICAL)
    threading.Thread(target=_exit_with_parent, name="parent-watch", daemon=True).start()
    iotcore.IotCoreBroker(config_path=config).run_forever()


if __name__ == "__main__":
    _serve(sys.argv[1])
