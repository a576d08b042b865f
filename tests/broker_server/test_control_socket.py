"""The socket in a store: its owner asks there, nobody else does, and no client holds up the
server.
"""

import contextlib
import json
import os
import queue
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from broker_server.service import control_socket, visiting
from broker_server.service.control_socket import MOST_CLIENTS, ControlSocket
from broker_server.service.local import LINE_LIMIT_BYTES, SOCKET, reach_server
from broker_server.service.visiting import ServerAccess, by_socket
from broker_server.settings.broker import BrokerConfig
from fleet_protocol.errors import ConfigError, TransportError
from fleet_protocol.requests import SteerRequest
from fleet_protocol.transport import Disconnected, Received

PATIENCE = 20
ASK = SteerRequest(request="r1", fleet="lab", wish="pause")

pytestmark = pytest.mark.skipif(
    not hasattr(socket, "AF_UNIX"), reason="this system has no such sockets"
)


@pytest.fixture
def requests():
    return queue.SimpleQueue()


@pytest.fixture
def at_hand(tmp_path, requests):
    with ControlSocket(tmp_path, requests.put) as listening:
        yield listening


@pytest.fixture
def open_folder():
    """A folder that every user of the computer enters. Pytest closes the folders above
    `tmp_path` to others, and does so again whenever a test beside this one starts it.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


def connected(folder):
    connection = reach_server(folder, PATIENCE)
    assert connection is not None
    return contextlib.closing(connection)


def said_to(connection):
    """Everything until the server hangs up."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(65536):
            received += data
    return received


def test_a_request_is_taken_and_answered_to_whom_asked(tmp_path, at_hand, requests):
    """In pieces as at once; an answer reaches the asker alone, and what is told to all reaches
    everybody.
    """
    with connected(tmp_path) as client, connected(tmp_path) as bystander:
        for byte in ASK.to_bytes() + b"\n":
            client.send(bytes([byte]))
        taken = requests.get(timeout=PATIENCE)
        assert taken.payload == ASK.to_bytes()
        bystander.sendall(b"\n")
        taken.answer(b'"for one"')
        at_hand.send_all(b'"for all"')
        with client.makefile("rb") as lines:
            assert [lines.readline(), lines.readline()] == [b'"for one"\n', b'"for all"\n']
        assert bystander.recv(100) == b'"for all"\n'
    assert requests.empty()


def test_who_comes_hears_first_how_the_server_is(tmp_path, at_hand):
    """What it said of itself last, so that who comes back after a restart knows of the run."""
    at_hand.greet_with(b'"before"')
    at_hand.greet_with(b'"now"')
    with connected(tmp_path) as client:
        assert client.recv(100) == b'"now"\n'


def test_the_socket_is_its_owners_alone(tmp_path, at_hand):
    """Whatever the mask of new files says."""
    mode = (tmp_path / SOCKET).stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600


STRANGER = """
import os, socket, sys
os.setgid(65534), os.setuid(65534)
connection = socket.socket(socket.AF_UNIX)
try:
    connection.connect(sys.argv[1])
except PermissionError:
    sys.exit("closed")
try:
    connection.sendall(b'{"type": "steer-request"}' + bytes([10]))
    sys.exit(connection.recv(100) and "answered")
except ConnectionError:
    sys.exit("let go")
"""


@pytest.mark.attack(
    "outsider",
    "Requests a run through the control socket as a different user of the computer",
    "the server closes the connection",
    "2026-11-28",
)
@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root becomes another user"
)
def test_another_user_is_not_taken(open_folder, requests):
    """Not by the file's mode; and where somebody changed that, not by who the system says is
    there.
    """
    replies = []
    with ControlSocket(open_folder, requests.put):
        for mode in (0o600, 0o666):
            (open_folder / SOCKET).chmod(mode)
            done = subprocess.run(
                [sys.executable, "-c", STRANGER, str(open_folder / SOCKET)],
                capture_output=True,
                text=True,
                timeout=PATIENCE,
                check=False,
            )
            replies.append((done.stderr.strip(), done.returncode))
    assert replies[0] == ("closed", 1)
    assert replies[1] in {("let go", 1), ("", 0)}  # hung up before or after he had written
    assert requests.empty()


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root becomes another user"
)
def test_a_command_tells_another_users_server_nothing(tmp_path, at_hand, monkeypatch):
    """A socket that somebody else put there would be given a whole configuration, and tell what he
    likes.
    """
    monkeypatch.setattr("os.geteuid", lambda: 1234)
    monkeypatch.setattr("broker_server.service.local.user_at", lambda _: 4321)
    with pytest.raises(ConfigError, match="belongs to user 4321: run this command as user"):
        reach_server(tmp_path, PATIENCE)


def test_a_long_path_is_no_hindrance(tmp_path, requests):
    """Systems take 108 bytes of an address; folders are deeper."""
    folder = tmp_path / ("x" * 120) / ("y" * 120)
    folder.mkdir(parents=True)
    with ControlSocket(folder, requests.put), connected(folder) as client:
        client.sendall(ASK.to_bytes() + b"\n")
        assert requests.get(timeout=PATIENCE).payload == ASK.to_bytes()
        assert stat.S_IMODE((folder / SOCKET).stat().st_mode) == 0o600
    assert not (folder / SOCKET).exists()


def test_what_a_killed_server_left_is_replaced(tmp_path, requests):
    """Nobody listens at it, which is as if there were none; the next server takes its place."""
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(tmp_path / SOCKET))
    assert reach_server(tmp_path, PATIENCE) is None
    with ControlSocket(tmp_path, requests.put), connected(tmp_path) as client:
        client.sendall(ASK.to_bytes() + b"\n")
        requests.get(timeout=PATIENCE)
    assert reach_server(tmp_path, PATIENCE) is None
    assert reach_server(tmp_path / "nowhere", PATIENCE) is None


def test_something_else_in_its_place_is_left_alone(tmp_path, requests, caplog):
    """The server works without, and its log says what to do."""
    (tmp_path / SOCKET).write_text("mine")
    with ControlSocket(tmp_path, requests.put) as at_hand:
        at_hand.send_all(b"1")
        at_hand.greet_with(b"2")
    assert (tmp_path / SOCKET).read_text() == "mine"
    assert "is not a socket; remove it" in caplog.text


@pytest.mark.attack(
    "outsider",
    "Sends endless, malformed or binary lines to the control socket",
    "the server closes the connection and keeps running",
    "2026-11-28",
)
@pytest.mark.parametrize("what", ["half", "too long", "two lines", "nothing"])
def test_who_breaks_the_form_is_let_go(tmp_path, requests, monkeypatch, what):
    """After his time, or at once; others are heard meanwhile."""
    monkeypatch.setattr(control_socket, "REQUEST_SECONDS", 0.5)
    sent = {
        "half": ASK.to_bytes(),
        "too long": b"[" * (LINE_LIMIT_BYTES + 2),
        "two lines": ASK.to_bytes() + b"\n" + ASK.to_bytes(),
        "nothing": b"",
    }[what]
    with (
        ControlSocket(tmp_path, requests.put),
        connected(tmp_path) as bad,
        connected(tmp_path) as good,
    ):
        with contextlib.suppress(ConnectionError):
            bad.sendall(sent)
        good.sendall(ASK.to_bytes() + b"\n")
        requests.get(timeout=PATIENCE).answer(b'"yes"')
        assert good.recv(100) == b'"yes"\n'
        assert said_to(bad) == b""
    assert requests.empty()


@pytest.mark.attack(
    "outsider",
    "Opens as many connections to the control socket as possible",
    "connections beyond the limit are refused; the run continues",
    "2026-11-28",
)
def test_there_are_so_many_clients(tmp_path, at_hand, requests):
    """The next is let go; when one has gone there is room."""
    with contextlib.ExitStack() as stack:
        many = [stack.enter_context(connected(tmp_path)) for _ in range(MOST_CLIENTS)]
        for client in many:
            client.sendall(b"\n")
        many[0].sendall(b"")
        with connected(tmp_path) as late:
            assert said_to(late) == b""
        many[0].close()
        give_up = time.monotonic() + PATIENCE
        while requests.empty():
            assert time.monotonic() < give_up
            with connected(tmp_path) as another, contextlib.suppress(ConnectionError):
                another.sendall(ASK.to_bytes() + b"\n")
                threading.Event().wait(0.05)


def test_who_does_not_read_is_let_go_and_holds_up_nobody(tmp_path, at_hand, monkeypatch):
    """A terminal that is held with Ctrl-S; what the server says waits in a bounded place."""
    monkeypatch.setattr(control_socket, "_MOST_WAITING_BYTES", 200_000)
    with connected(tmp_path) as deaf:
        deaf.sendall(b"\n")
        began = time.monotonic()
        for _ in range(200):
            at_hand.send_all(b'"' + b"x" * 10_000 + b'"')
        assert time.monotonic() - began < PATIENCE / 2
        give_up = time.monotonic() + PATIENCE
        while at_hand._clients:
            assert time.monotonic() < give_up
            threading.Event().wait(0.05)


def test_an_answer_to_who_has_gone_is_nobodys(tmp_path, at_hand, requests):
    """And the server goes on."""
    with connected(tmp_path) as client:
        client.sendall(ASK.to_bytes() + b"\n")
        taken = requests.get(timeout=PATIENCE)
    taken.answer(b'"yes"')
    at_hand.send_all(b'"all"')
    with connected(tmp_path) as next_client:
        next_client.sendall(ASK.to_bytes() + b"\n")
        requests.get(timeout=PATIENCE).answer(b'"there"')
        assert next_client.recv(100) == b'"there"\n'


def test_who_follows_a_run_hears_the_next_server(tmp_path, requests, monkeypatch):
    """As one that was killed and started again; it is told that the first has gone."""
    monkeypatch.setattr(visiting, "_AGAIN_SECONDS", 0.05)
    status = json.dumps({"type": "server", "fleet": "lab", "online": True}).encode()
    home = ServerAccess("lab", tmp_path, BrokerConfig())
    with contextlib.ExitStack() as stack:
        first = ControlSocket(tmp_path, requests.put)
        with first:
            inbox = stack.enter_context(by_socket(home, reach_server(tmp_path, PATIENCE), ASK))
            requests.get(timeout=PATIENCE).answer(b'{"type": "run-steered"}')
            assert inbox.get(timeout=PATIENCE) == Received(
                "shoal/v1/lab/server/events", b'{"type": "run-steered"}'
            )
        assert isinstance(inbox.get(timeout=PATIENCE), Disconnected)
        with ControlSocket(tmp_path, requests.put) as second:
            second.greet_with(status)
            assert inbox.get(timeout=PATIENCE) == Received("shoal/v1/lab/server/status", status)
            stack.close()


def test_a_server_that_goes_before_it_is_asked_is_said(tmp_path, requests):
    """By the reason of the system."""
    with ControlSocket(tmp_path, requests.put):
        connection = reach_server(tmp_path, PATIENCE)
    connection.close()
    home = ServerAccess("lab", tmp_path, BrokerConfig())
    with (
        pytest.raises(TransportError, match="does not accept the request"),
        by_socket(home, connection, ASK),
    ):
        pass


def test_a_server_that_is_busy_is_asked_again_and_named(tmp_path):
    """The system lets no more wait: that is not as if nobody listened, or a command would go to the
    broker.
    """
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.socket(socket.AF_UNIX))
        listening.bind(str(tmp_path / SOCKET))
        listening.listen(0)
        waiting = []
        with contextlib.suppress(BlockingIOError):
            while len(waiting) < 100:
                waiting_client = stack.enter_context(socket.socket(socket.AF_UNIX))
                waiting_client.setblocking(False)
                waiting_client.connect(str(tmp_path / SOCKET))
                waiting.append(waiting_client)
        assert len(waiting) < 100
        with pytest.raises(TransportError, match="is busy with other commands"):
            reach_server(tmp_path, 0.3)

        def take_all():
            for _ in waiting:
                stack.enter_context(contextlib.closing(listening.accept()[0]))

        room = threading.Timer(0.5, take_all)
        room.start()
        with connected(tmp_path):
            room.join(PATIENCE)


def test_refused_clients_write_few_lines(tmp_path, at_hand, caplog):
    """However many come, the log has room for other things."""
    with contextlib.ExitStack() as stack:
        for _ in range(MOST_CLIENTS):
            client = stack.enter_context(connected(tmp_path))
            client.sendall(b"\n")
        for _ in range(50):
            with connected(tmp_path) as late:
                assert said_to(late) == b""
    lines = [line for line in caplog.messages if "accepts no more clients" in line]
    assert 1 <= len(lines) <= 6


@pytest.mark.attack(
    "file",
    "A store from somebody else has a link to another program's socket in place of its own socket",
    "no command connects to that socket or sends anything to it",
    "2026-11-29",
)
def test_a_link_in_place_of_the_socket_is_not_followed(tmp_path):
    """The other program belongs to the same user, so it would have accepted the request."""
    store = tmp_path / "store"
    store.mkdir()
    with socket.socket(socket.AF_UNIX) as foreign_socket:
        foreign_socket.bind(str(tmp_path / "agent.sock"))
        foreign_socket.listen()
        foreign_socket.setblocking(False)
        (store / "control.sock").symlink_to(tmp_path / "agent.sock")
        assert reach_server(store, 1.0) is None
        with pytest.raises(BlockingIOError):
            foreign_socket.accept()
