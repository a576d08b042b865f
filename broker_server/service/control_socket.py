"""The server's end of the socket in its store: requests from clients, and events to all of them.

Each client sends one request. A separate thread serves the clients, so that a client that sends or
reads nothing does not delay a round: a client has limited time to send its line, and is
disconnected if too much unread data waits for it.
"""

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from typing_extensions import Self

from broker_server.service.limits import Rate, TokenBucket
from broker_server.service.local import (
    LINE_LIMIT_BYTES,
    SOCKET,
    SUPPORTED,
    address_of,
    may_ask,
    remove_stale,
    user_at,
)

_LOG = logging.getLogger(__name__)

MOST_CLIENTS = 32
REQUEST_SECONDS = 10.0  # from connecting to the end of the line
_MOST_WAITING_BYTES = 8 * 1024 * 1024  # per client: some 10,000 unread events
_READ_BYTES = 64 * 1024
_STOP_SECONDS = 5.0
_LINES = Rate(1 / 60, 5)  # of the log, about disconnected clients


@dataclass(frozen=True)
class LocalRequest:
    """A local client's request, and the way to answer only that client.

    An answer to a closed client is dropped.
    """

    payload: bytes
    answer: Callable[[bytes], None]


@dataclass(eq=False)
class _Client:
    """A connected client.

    Attributes:
        connection: to it.
        until: deadline for its request.
        received: the beginning of its request.
        waiting: data that is to be sent to it.
        asked: whether its request is complete.
    """

    connection: socket.socket
    until: float
    received: bytearray = field(default_factory=bytearray)
    waiting: bytearray = field(default_factory=bytearray)
    asked: bool = False


class ControlSocket:
    """Listens in the folder of a store, which its server has locked, during the ``with`` block.

    If the system or the folder's file system has no such sockets, the log reports it, and no client
    can connect.

    Args:
        folder: the store's folder.
        put: receives each request, in the thread of the socket.
    """

    def __init__(self, folder: Path, put: Callable[[LocalRequest], None]) -> None:
        self._folder = folder
        self._put = put
        self._greeting = b""
        self._clients: set[_Client] = set()
        self._lock = threading.Lock()  # guards the clients and their unread data
        self._listening: socket.socket | None = None
        self._stopping = threading.Event()
        self._lines = TokenBucket(_LINES)
        self._refused = 0  # since the last log line about it
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if not SUPPORTED:
            return self
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._bind(listening)
        except OSError as error:
            listening.close()
            _LOG.warning(
                "local commands cannot reach this server: no socket in %s: %s",
                self._folder,
                error,
            )
            return self
        listening.setblocking(False)
        self._listening = listening
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._work, name="shoal-control", daemon=True)
        self._thread.start()
        return self

    def _bind(self, listening: socket.socket) -> None:
        remove_stale(self._folder)
        with address_of(self._folder) as address:
            listening.bind(address)
        # Before the socket listens, so that no client connects earlier.
        (self._folder / SOCKET).chmod(0o600)
        listening.listen(MOST_CLIENTS)

    def __exit__(self, *_: object) -> None:
        if self._listening is None or self._thread is None:
            return
        self._stopping.set()
        self._wake_up()
        self._thread.join(_STOP_SECONDS)
        for client in list(self._clients):
            self._disconnect(client)
        self._selector.close()
        self._listening.close()
        self._wake.close()
        self._woken.close()
        with contextlib.suppress(OSError):
            (self._folder / SOCKET).unlink()

    # Called in the server's thread.

    def greet_with(self, line: bytes) -> None:
        """Send the server's state to all clients, and from now on first to each new client."""
        with self._lock:
            self._greeting = line
        self.send_all(line)

    def send_all(self, line: bytes) -> None:
        """Send all clients a JSON document without line breaks."""
        with self._lock:
            for client in self._clients:
                client.waiting += line + b"\n"
            has_clients = bool(self._clients)
        if has_clients:
            self._wake_up()

    def _answer(self, client: _Client, line: bytes) -> None:
        with self._lock:
            client.waiting += line + b"\n"
        self._wake_up()

    def _wake_up(self) -> None:
        if self._listening is not None:
            with contextlib.suppress(OSError):  # a full pipe has already woken it
                self._wake.send(b"\0")

    # The thread of the socket.

    def _work(self) -> None:
        while not self._stopping.is_set():
            for key, events in self._selector.select(self._patience()):
                if key.fileobj is self._listening:
                    self._accept()
                elif key.fileobj is self._woken:
                    with contextlib.suppress(OSError):
                        self._woken.recv(_READ_BYTES)
                elif events & selectors.EVENT_READ:
                    self._read(key.data)
            self._serve_clients(time.monotonic())
        self._serve_clients(time.monotonic())  # sends the last events

    def _patience(self) -> float | None:
        ends = [client.until for client in self._clients if not client.asked]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()  # type: ignore[union-attr]
        except OSError:  # it has closed already, or no descriptors are left
            return
        connection.setblocking(False)
        user = user_at(connection)
        why = ""
        if not may_ask(user):
            why = f"user {user} is not allowed"
        elif len(self._clients) >= MOST_CLIENTS:
            why = f"{MOST_CLIENTS} clients are connected"
        if why:
            self._log_refused(why)
            connection.close()
            return
        client = _Client(connection, time.monotonic() + REQUEST_SECONDS)
        with self._lock:
            if self._greeting:
                client.waiting += self._greeting + b"\n"
            self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _log_refused(self, why: str) -> None:
        """Log disconnected clients, but only a few of many."""
        self._refused += 1
        if self._lines.spend(time.monotonic()):
            text = (
                "the socket in %s accepts no more clients: %s (%d refused since the previous line)"
            )
            _LOG.warning(text, self._folder, why, self._refused)
            self._refused = 0

    def _read(self, client: _Client) -> None:
        try:
            data = client.connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or client.asked:  # it has closed, or sends more than one line
            self._disconnect(client)
            return
        client.received += data
        line, end, excess = client.received.partition(b"\n")
        if excess or len(line) > LINE_LIMIT_BYTES:
            self._disconnect(client)
        elif end:
            client.asked = True
            client.received.clear()
            if line:  # a client that only listens sends an empty line
                self._put(LocalRequest(bytes(line), lambda answer: self._answer(client, answer)))

    def _serve_clients(self, now: float) -> None:
        """Send waiting data, and disconnect clients that are too slow."""
        for client in list(self._clients):
            with self._lock:
                is_open = self._send(client)
                has_too_much = len(client.waiting) > _MOST_WAITING_BYTES
                has_more = bool(client.waiting)
            is_late = not client.asked and now >= client.until
            if not is_open or has_too_much or is_late:
                self._disconnect(client)
                continue
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if has_more else 0)
            self._selector.modify(client.connection, events, client)

    def _send(self, client: _Client) -> bool:
        """Send what the client accepts now; return whether it is still connected."""
        try:
            while client.waiting:
                del client.waiting[: client.connection.send(client.waiting)]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def _disconnect(self, client: _Client) -> None:
        with self._lock:
            self._clients.discard(client)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.connection)
        client.connection.close()
