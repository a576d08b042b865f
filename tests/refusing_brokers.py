"""Brokers that refuse: by rights, by the size of a packet, or as a script says."""

import base64
import contextlib
import hashlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.brokers import mosquitto_broker

FORTY_KB = 40_000
_SECONDS_TO_LEAVE = 2.0
_PLUGINS = (
    Path("/usr/lib/x86_64-linux-gnu/mosquitto_dynamic_security.so"),
    Path("/usr/lib/aarch64-linux-gnu/mosquitto_dynamic_security.so"),
)
_KINDS = {"publish": "publishClientSend", "subscribe": "subscribePattern"}


class _Rights:
    """A Mosquitto with its dynamic security plugin: the user ``board`` has the rights of a test,
    ``server`` has all.
    """

    def __init__(self, broker) -> None:
        self.port = broker.port
        self.start = broker.start
        self.stop = broker.stop

    def login(self, name: str) -> str:
        """Address of the broker with the login of a user."""
        return f"mqtt://{name}:{name}@127.0.0.1:{self.port}"


@contextlib.contextmanager
def dynamic_security(tmp_path: Path, rights: list[str]) -> Iterator[_Rights]:
    """A broker on which ``board`` may do what lines like ``subscribe shoal/#`` say.

    SUBACK and PUBACK carry its refusals.
    """
    plugin = next((path for path in _PLUGINS if path.exists()), None)
    if plugin is None:
        pytest.skip("mosquitto's dynamic security plugin is not installed")
    rules = tmp_path / "dynamic.json"
    everything = [_rule("publish shoal/#"), _rule("subscribe shoal/#")]
    roles = [
        {"rolename": "server", "acls": everything},
        {"rolename": "board", "acls": [_rule(line) for line in rights]},
    ]
    default = {
        "publishClientSend": False,
        "publishClientReceive": True,
        "subscribe": False,
        "unsubscribe": True,
    }
    document = {
        "defaultACLAccess": default,
        "clients": [_client("server"), _client("board")],
        "groups": [],
        "roles": roles,
    }
    rules.write_text(json.dumps(document))
    rules.chmod(0o600)
    more = f"\nplugin {plugin}\nplugin_opt_config_file {rules}\n"
    with mosquitto_broker(tmp_path, more=more, anonymous=False) as broker:
        yield _Rights(broker)


def _rule(line: str) -> dict[str, object]:
    kind, topic = line.split()
    return {"acltype": _KINDS[kind], "topic": topic, "priority": 0, "allow": True}


def _client(name: str) -> dict[str, object]:
    salt = os.urandom(12)
    digest = hashlib.pbkdf2_hmac("sha512", name.encode(), salt, 101)
    return {
        "username": name,
        "textName": "",
        "roles": [{"rolename": name}],
        "password": base64.b64encode(digest).decode(),
        "salt": base64.b64encode(salt).decode(),
        "iterations": 101,
    }


class QuotaBroker:
    """A front of a broker that ends the connection of who sends a packet over a quota.

    Attributes:
        connections: that were made.
        ended: connections that were ended for a packet.
        bytes: that passed, either way.
    """

    def __init__(self, behind: int, quota: int, answer: bytes) -> None:
        self._behind = behind
        self._quota = quota
        self._answer = answer
        self.connections = 0
        self.ended = 0
        self.bytes = 0
        self._refused: set[socket.socket] = set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"mqtt://127.0.0.1:{self._listening.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            self.connections += 1
            server = socket.create_connection(("127.0.0.1", self._behind))
            for work in (self._pass_up, self._pass_down):
                threading.Thread(target=work, args=(client, server), daemon=True).start()

    def _pass_up(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError, ConnectionError):
            while True:
                kind, head, body = read_packet(client)
                self.bytes += len(head) + len(body)
                if kind >> 4 == 3 and len(body) > self._quota:
                    self.ended += 1
                    self._refuse(client)
                    break
                server.sendall(head + body)
        _end(client, server)

    def _refuse(self, client: socket.socket) -> None:
        """Answer, and read what the client still sends until it ends the connection.

        A connection that is closed with unread bytes is reset, and a reset may overtake the answer.
        """
        self._refused.add(client)
        client.sendall(self._answer)
        client.shutdown(socket.SHUT_WR)
        client.settimeout(_SECONDS_TO_LEAVE)
        while client.recv(65536):
            pass

    def _pass_down(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                self.bytes += len(data)
                client.sendall(data)
        if client not in self._refused:
            _end(client, server)

    def close(self) -> None:
        """Accept no more connections."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join(5)


def _end(*connections: socket.socket) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()


@contextlib.contextmanager
def quota_broker(behind: int, quota: int, answer: bytes) -> Iterator[QuotaBroker]:
    """A front of the broker on a port that takes no packet over a quota.

    Args:
        behind: the broker's port.
        quota: bytes of the largest packet.
        answer: sent before the connection is ended; empty for no reason.
    """
    with contextlib.closing(QuotaBroker(behind, quota, answer)) as front:
        yield front


def read_packet(connection: socket.socket) -> tuple[int, bytes, bytes]:
    """Read a packet: its first byte, its whole header, and its body."""
    head = _exactly(connection, 1)
    size = 0
    for shift in range(0, 28, 7):
        byte = _exactly(connection, 1)
        head += byte
        size |= (byte[0] & 127) << shift
        if byte[0] < 128:
            break
    return head[0], head, _exactly(connection, size)


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise ConnectionError
        data += piece
    return data


@contextlib.contextmanager
def scripted_broker(
    answers: Mapping[int, bytes | Callable[[], bytes] | None],
) -> Iterator[str]:
    """Something that answers packets by their first byte; the address of it.

    None ends the connection; a packet that no answer is for gets none.
    """
    listening = socket.create_server(("127.0.0.1", 0))

    def converse(connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ConnectionError), connection:
            while True:
                kind, _, _ = read_packet(connection)
                answer = answers.get(kind, b"")
                if answer is None:
                    return
                connection.sendall(answer() if callable(answer) else answer)

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            converse(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"mqtt://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(5)
