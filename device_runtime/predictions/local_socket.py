"""Predictions for other programs on the board over a Unix socket.

A request is a line, and so is its answer.
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
    """Serves from as many threads as there may be clients until it is closed.

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
                path.unlink()  # of an agent that was killed: this one holds the state folder's lock
            self._socket.bind(str(path))
            # Who may write to the file may ask.
            path.chmod(0o660)
        except OSError as error:
            self._socket.close()
            raise ConfigError(
                f"[predict] socket: cannot listen at {path}: {error}; name another path"
            ) from error
        self._socket.listen()
        for _ in range(settings.max_clients):
            threading.Thread(
                target=self._serve,
                name="serving",
                daemon=True,
            ).start()

    def close(self) -> None:
        """Let nobody in any more."""
        self._is_open = False
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes those who wait for a client
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while self._is_open:
            with contextlib.suppress(OSError):  # a client is gone or late, or this is closed
                link, _ = self._socket.accept()
                with link:
                    self._serve_client(link)

    def _serve_client(self, link: socket.socket) -> None:
        max_bytes = self._settings.max_bytes
        for line in _lines(link, max_bytes, self._settings.seconds):
            if len(line) <= max_bytes:
                reply = answer(self._predictor, line)
            else:
                reply = encode_answer(error=f"above {max_bytes} bytes")
            link.settimeout(self._settings.seconds)
            link.sendall(reply)


def _lines(link: socket.socket, max_bytes: int, seconds: float) -> Iterator[bytes]:
    """Yield the requests of a client, each whole within so many seconds.

    One that is too long, as far as it has come, is the last.
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
            received += block or b"\n"  # a client that has closed has ended its last line
        line, _, received = received.partition(b"\n")
        yield line
