"""Serves the page in a thread; an address that others can reach requires a token."""

import asyncio
import contextlib
import secrets
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

import h11
import uvicorn
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from broker_server.settings.fleet import ViewConfig
from fleet_protocol.errors import BlobError, ConfigError, TransportError
from fleet_protocol.foreign_files import read_regular
from fleet_protocol.identity.enrolment import write_secret
from shoal.view.actions import Steer
from shoal.view.app import make_app

# Longer than uvicorn's own graceful end, below.
_STOP_SECONDS = 5.0
_MOST_TOKEN_BYTES = 4096
# The training server needs open files, too.
_CONNECTIONS = 128
# A request, with its body, must have arrived after so long; it has a few kilobytes.
_REQUEST_SECONDS = 10.0
# A client that reads nothing of its answer for so long is gone, or holds the connection on purpose.
_ANSWER_SECONDS = 60.0


class _Connection(H11Protocol):
    """One of a limited number of connections, which waits only so long for its client."""

    _request_timer: asyncio.TimerHandle | None = None
    _answer_timer: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > _CONNECTIONS:
            transport.abort()
        self._time_request()

    @override
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_request()

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._time_request()

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._answer_timer = self.loop.call_later(_ANSWER_SECONDS, self.transport.abort)

    @override
    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._answer_timer)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        _cancel(self._request_timer)
        _cancel(self._answer_timer)

    def _time_request(self) -> None:
        """Start the time of a request that has not arrived completely; bytes do not extend it."""
        # uvicorn stops its own timer at the first byte of a request.
        if self.conn.their_state not in {h11.IDLE, h11.SEND_BODY}:
            _cancel(self._request_timer)
            self._request_timer = None
        elif self._request_timer is None:
            self._request_timer = self.loop.call_later(_REQUEST_SECONDS, self.transport.abort)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


@contextlib.contextmanager
def serving(
    store: Path,
    where: ViewConfig,
    token_file: Path | None = None,
    steer: Steer | None = None,
) -> Iterator[str]:
    """Serve the page of a store while the block runs; yields the page's address.

    `where` sets the address, and whether operators may act with the token in ``operator.token`` of
    the store. A missing token file is created, readable only by its owner. Without a token file
    reading is open, which is allowed only on loopback. `steer` is for `shoal.view.actions.acting`.

    Raises:
        ConfigError: other machines could reach the page without a token, or other users could read
            the token.
        TransportError: the address is in use, or does not belong to this machine.
    """
    host = where.host.strip("[]")
    port = where.port
    if token_file is None and not _loopback(host):
        raise ConfigError(
            f"anyone who reaches {host}:{port} could read the fleet: give a --token-file (it is"
            " created with a new token if it is missing), or omit --host"
        )
    token = None if token_file is None else _token(token_file)
    operator = _token(store / "operator.token") if where.actions else None
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # Opened here and not by uvicorn, so that an error appears before the thread starts.
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise TransportError(
            f"cannot listen on {host}:{port}: {error.strerror}; stop the other server of this"
            " fleet if one runs, or use another port"
        ) from error
    app = make_app(store, token, operator, steer)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=_Connection,
            # The page has no web sockets, which would not count as connections.
            ws="none",
            log_level="warning",
            timeout_graceful_shutdown=3,
            # Otherwise any program on this machine could forge the address in the log.
            proxy_headers=False,
        )
    )
    thread = threading.Thread(
        target=server.run, args=([listening],), name="shoal-view", daemon=True
    )
    with listening:
        thread.start()
        try:
            yield f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}/"
        finally:
            # First, because clients that follow the log would keep the server from ending.
            app.state.over.set()
            server.should_exit = True
            thread.join(_STOP_SECONDS)


def _loopback(host: str) -> bool:
    return host in {
        "localhost",
        "127.0.0.1",
        "::1",
    }  # the host names that `shoal.view.app` accepts without a token


def _token(path: Path) -> str:
    if not path.exists():
        write_secret(path, secrets.token_urlsafe(32) + "\n")
    if path.stat().st_mode & 0o077:
        raise ConfigError(f"others can read the token {path}: chmod 600 {quote(str(path))}")
    try:
        # A secret that is mounted is reached by a link; a pipe would wait for a writer.
        token = read_regular(path.resolve(), _MOST_TOKEN_BYTES).decode().strip()
    except (BlobError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the token {path}: {error}; remove the file") from error
    if len(token) < 16:
        raise ConfigError(
            f"{path} does not contain a token of at least 16 characters; remove the file to"
            " create a new one"
        )
    return token
