"""Predictions for other programs on the board over a Unix socket: a request is a line, and so is its answer."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from device_runtime.answering import answer, encoded
from device_runtime.predicting import Predictor
from device_runtime.settings import PredictConfig
from fleet_protocol.errors import ConfigError


class Serving:
    """Serves from as many threads as there may be clients until it is closed; a ConfigError where it cannot listen."""

    def __init__(self, predictor: Predictor, rules: PredictConfig, path: Path) -> None:
        self._rules, self._path, self._open = rules, path, True
        self._predictor, self._socket = predictor, socket.socket(socket.AF_UNIX)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_socket():
                path.unlink()  # of an agent that was killed: this one holds the state folder's lock
            self._socket.bind(str(path))
            path.chmod(0o660)
        except OSError as error:
            self._socket.close()
            raise ConfigError(f"[predict] socket: cannot listen at {path}: {error}; name another path") from error
        self._socket.listen()
        for _ in range(rules.max_clients):
            threading.Thread(target=self._serve, name="serving", daemon=True).start()

    def _serve(self) -> None:
        most = self._rules.max_bytes
        while self._open:
            with contextlib.suppress(OSError):  # one is gone or late, or this is closed
                link, _ = self._socket.accept()
                with link:
                    for line in _lines(link, most, self._rules.seconds):
                        fits = len(line) <= most
                        said = answer(self._predictor, line) if fits else encoded(error=f"above {most} bytes")
                        link.settimeout(self._rules.seconds)
                        link.sendall(said)

    def close(self) -> None:
        """Let nobody in any more."""
        self._open = False
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes those who wait for a client
        self._socket.close()
        self._path.unlink(missing_ok=True)


def _lines(link: socket.socket, most: int, seconds: float) -> Iterator[bytes]:
    """The requests of a client, each whole in time; one that is too long, as far as it has come, is the last."""
    line = rest = b""
    while len(line) <= most:
        ends = time.monotonic() + seconds
        while b"\n" not in rest and len(rest) <= most:
            link.settimeout(max(ends - time.monotonic(), 1e-3))
            part = link.recv(2**16)
            if not (part or rest):
                return
            rest += part or b"\n"
        line, _, rest = rest.partition(b"\n")
        yield line
