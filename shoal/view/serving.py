"""Serves the page in a thread, at an address, with a token where others may reach it."""

import asyncio
import contextlib
import secrets
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from broker_server.settings.fleet import ViewConfig
from fleet_protocol.errors import ConfigError, TransportError
from fleet_protocol.identity.enrolment import write_secret
from shoal.view.actions import Steer
from shoal.view.app import make_app

_STOP_SECONDS = 5.0
_CONNECTIONS, _REQUEST_SECONDS = (
    128,
    10.0,
)  # at once, and until one has asked: the server beside needs files, too


class _Connection(H11Protocol):
    """One of so many, and not for long without a request."""

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > _CONNECTIONS:
            transport.abort()
        self.loop.call_later(_REQUEST_SECONDS, self._end_unasked)

    def _end_unasked(self) -> None:
        if not self.headers:
            self.transport.abort()


@contextlib.contextmanager
def serving(
    store: Path,
    where: ViewConfig,
    token_file: Path | None = None,
    steer: Steer | None = None,
) -> Iterator[str]:
    """Serve the page of a store while the block lasts, which gets the page's address.

    `where` says where to listen, and whether operators act with the token in ``operator.token`` of
    the store. The file of the token that is asked for is made, for its owner alone, where there is
    none; without one no token is asked for, which goes on loopback alone. `steer` is for
    `shoal.view.actions.acting`.

    Raises:
        ConfigError: others could reach it without a token, or could read the token.
        TransportError: the address is taken, or not one of this machine.
    """
    host = where.host.strip("[]")
    port = where.port
    if token_file is None and not _loopback(host):
        raise ConfigError(
            f"whoever reaches {host}:{port} could read the fleet: name a file with --token-file, "
            "which is made with a new token where there is none, or leave --host out"
        )
    token = None if token_file is None else _token(token_file)
    operator = _token(store / "operator.token") if where.actions else None
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise TransportError(
            f"cannot listen on {host}:{port}: {error.strerror}; "
            "is a server of this fleet up? Or take another port"
        ) from error
    app = make_app(store, token, operator, steer)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=_Connection,
            log_level="warning",
            timeout_graceful_shutdown=3,
            # Else any program on this machine chooses the address that the log shows for it.
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
            app.state.over.set()
            server.should_exit = True
            thread.join(_STOP_SECONDS)


def _loopback(host: str) -> bool:
    return host in {
        "localhost",
        "127.0.0.1",
        "::1",
    }  # the names that `shoal.view.app` takes without a token


def _token(path: Path) -> str:
    if not path.exists():
        write_secret(path, secrets.token_urlsafe(32) + "\n")
    if path.stat().st_mode & 0o077:
        raise ConfigError(f"others may read the token {path}: chmod 600 {path}")
    token = path.read_text().strip()
    if len(token) < 16:
        raise ConfigError(
            f"{path} holds no token of at least 16 characters; remove it, and a new one is made"
        )
    return token
