"""Serves predictions to other programs on the board over a Unix socket.

A request is one line, and so is its answer.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from device_runtime.predictions.predictor import Predictor
from device_runtime.predictions.requests import answer, encode_answer
from device_runtime.settings import PredictConfig
from fleet_protocol.errors import ConfigError

_READ_BYTES = 2**16
_SHORTEST_WAIT_SECONDS = 1e-3  # a timeout of 0 would make a socket that never waits


class LocalSocket:
    """Serves requests with one thread per client until it is closed.

    Raises:
        ConfigError: it cannot listen.
    """

    def __init__(
        self,
        predictor: Predictor,
        settings: PredictConfig,
        path: Path,
    ) -> None:
        self._predictor = predictor
        self._settings = settings
        self._path = path
        self._is_open = True
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_socket():
                # left by an agent that was killed: this agent holds the state
                # folder's lock
                path.unlink()
            self._socket.bind(str(path))
            # A program that may write to the socket's file may send requests.
            path.chmod(0o660)
        except OSError as error:
            self._socket.close()
            raise ConfigError(
                f"[predict] socket: cannot listen at {path}: {error}; choose another path"
            ) from error
        self._socket.listen()
        for _ in range(settings.max_clients):
            threading.Thread(
                target=self._serve,
                name="serving",
                daemon=True,
            ).start()

    def close(self) -> None:
        """Accept no further clients."""
        self._is_open = False
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes threads that wait for a client
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while self._is_open:
            # a client has closed or is late, or this server is closed
            with contextlib.suppress(OSError):
                link, _ = self._socket.accept()
                with link:
                    self._serve_client(link)

    def _serve_client(self, link: socket.socket) -> None:
        max_bytes = self._settings.max_bytes
        for line in _lines(link, max_bytes, self._settings.seconds):
            if len(line) <= max_bytes:
                reply = answer(self._predictor, line)
            else:
                reply = encode_answer(error=f"longer than {max_bytes} bytes")
            link.settimeout(self._settings.seconds)
            link.sendall(reply)


def _lines(link: socket.socket, max_bytes: int, seconds: float) -> Iterator[bytes]:
    """Yield the requests of a client; each must arrive whole within the time limit.

    If a request is too long, its beginning is the last one yielded.
    """
    line = b""
    received = b""
    while len(line) <= max_bytes:
        deadline = time.monotonic() + seconds
        while b"\n" not in received and len(received) <= max_bytes:
            link.settimeout(max(deadline - time.monotonic(), _SHORTEST_WAIT_SECONDS))
            block = link.recv(_READ_BYTES)
            if not block and not received:
                return
            # a client that has closed the connection has ended its last line
            received += block or b"\n"
        line, _, received = received.partition(b"\n")
        yield line
