"""A Mosquitto of a fleet with identities: one that the server starts, and one of the operator's.

The latter is set up by the README that `shoal init` writes, command by command.
"""

import contextlib
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from broker_server.service.authority import enroll, found_fleet, revoke
from broker_server.service.launch import server_status
from broker_server.service.membership import broker_address, hosted_broker, member_of
from broker_server.service.new_fleet import NewFleet
from broker_server.service.server import Server
from broker_server.settings.broker import BrokerConfig
from broker_server.settings.fleet import FleetConfig
from fleet_protocol.configuration import load_config
from fleet_protocol.errors import BrokerRefusedError, TransportError
from fleet_protocol.identity.enrolment import read_enrolment
from fleet_protocol.link import Link
from fleet_protocol.refusals import CERTIFICATE_REFUSED
from fleet_protocol.topics import Topics
from fleet_protocol.transport import (
    BrokerAddress,
    Connected,
    Disconnected,
    LoginRefused,
    Received,
)
from shoal.cli.main import app
from tests.brokers import free_port, needs_mosquitto

TOPICS = Topics("lab")
PATIENCE_SECONDS = 20.0
HOST = Path("/etc/mosquitto")
# What Debian's package has in mosquitto.conf, but for the places of its own files.
DEBIAN = """\
persistence true
persistence_location {root}/lib/
log_dest file {root}/log/mosquitto.log
include_dir {root}/etc/conf.d
"""


def eventually(condition):
    """Whether something becomes true within seconds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition() and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    return condition()


class Clients:
    """Connections to a broker, which are closed at the end."""

    def __init__(self, folder, stack):
        self._folder = folder
        self._stack = stack

    def open(self, enrolment, name):
        """A connection, and what arrives on it."""
        inbox = queue.SimpleQueue()
        link = Link(enrolment.address(self._folder / name), name, inbox)
        self._stack.callback(link.close)
        link.connect(PATIENCE_SECONDS)
        return link, inbox

    def is_refused(self, enrolment, name):
        """Whether the broker lets nobody in with this enrolment, at once and for its certificate."""
        link = Link(enrolment.address(self._folder / name), name, queue.SimpleQueue())
        with pytest.raises(BrokerRefusedError, match=r"Certificate refused.*`shoal enroll`"):
            link.connect(PATIENCE_SECONDS)
        return True


def arrives(server, inbox, topic):
    """Whether what the server publishes on a topic reaches a client within seconds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        server.publish(topic, b"for its reader")
        with contextlib.suppress(queue.Empty):
            event = inbox.get(timeout=0.2)
            if isinstance(event, Received) and event.topic == topic:
                return True
    return False


@pytest.fixture
def hosted(tmp_path):
    """A Mosquitto as the server starts it, the fleet's folder, and clients."""
    needs_mosquitto()
    folder = tmp_path / "lab"
    port = free_port()
    found_fleet(folder, NewFleet("lab", "127.0.0.1", port))
    config = BrokerConfig(url="mosquitto", identity=folder / "server.enrolment", port=port)
    with (
        hosted_broker(config, "lab", tmp_path / "broker") as broker,
        contextlib.ExitStack() as stack,
    ):
        yield broker, folder, Clients(tmp_path, stack)


def test_a_new_member_gets_in_and_nobody_else_is_interrupted(hosted):
    """Mosquitto reads its rules again: the process is the same, and so is each connection."""
    broker, folder, clients = hosted
    first = broker.pid
    server, heard = clients.open(read_enrolment(folder / "server.enrolment"), "server")
    board, inbox = clients.open(read_enrolment(enroll(folder, "pi-1")), "pi-1")
    assert eventually(lambda: "user pi-1" in (folder.parent / "broker" / "acl").read_text())
    board.subscribe(TOPICS.task("pi-1"))
    assert arrives(server, inbox, TOPICS.task("pi-1"))
    assert broker.pid == first
    assert not broker.ensure()
    heard.get_nowait()  # that it connected
    assert heard.empty()


@pytest.mark.parametrize("change", [enroll, revoke])
def test_a_withdrawn_enrolment_is_put_out_and_stays_out(hosted, change):
    """Mosquitto starts again, and takes everybody else back."""
    broker, folder, clients = hosted
    old = read_enrolment(enroll(folder, "pi-1"))
    server, _ = clients.open(read_enrolment(folder / "server.enrolment"), "server")
    board, inbox = clients.open(old, "pi-1")
    first = broker.pid
    change(folder, "pi-1")
    assert eventually(lambda: broker.pid not in {first, None} and broker.alive)
    assert eventually(lambda: server.connected)
    assert clients.is_refused(old, "again")
    assert not board.connected
    events = [inbox.get(timeout=PATIENCE_SECONDS) for _ in range(3)]
    assert [type(event) for event in events] == [Connected, Disconnected, LoginRefused]
    assert events[2].code == CERTIFICATE_REFUSED
    assert broker.ensure()  # which the server's log tells
    assert not broker.ensure()
    if change is enroll:
        clients.open(read_enrolment(folder / "devices" / "pi-1.enrolment"), "new")


def test_it_ends_with_a_server_that_is_killed(hosted):
    """The program itself, too, and its port is free for the next server."""
    broker, _, _ = hosted
    broker._process.stdin.close()  # as the system does
    assert eventually(lambda: not broker.alive)
    broker._process.wait(PATIENCE_SECONDS)
    assert broker.ensure()


class OwnMosquitto:
    """A computer of the operator's, on which the commands of the README are typed.

    Its root is a folder; packages and services are what a test has instead of apt and systemd.
    """

    def __init__(self, root):
        self.root = root
        self._process = None
        for name in ("etc/conf.d", "lib", "log", "home"):
            (root / name).mkdir(parents=True)
        self._is_root = os.geteuid() == 0
        if self._is_root:
            # As there, it becomes a user of its own, who must be able to read what it needs.
            root.chmod(0o755)
            for name in ("lib", "log"):
                shutil.chown(root / name, "mosquitto")
        (root / "etc" / "mosquitto.conf").write_text(DEBIAN.format(root=root))

    def type(self, line, folder):
        """Do a command of the README."""
        words = shlex.split(line.replace(f"{HOST}", f"{self.root / 'etc'}"))
        if words[0] == "scp":
            assert words[1:] == ["-r", "mosquitto", "127.0.0.1:"]
            shutil.copytree(folder / "mosquitto", self.home, dirs_exist_ok=True)
            return
        assert words.pop(0) == "sudo"
        match words:
            case ["apt", "install", "mosquitto"]:
                needs_mosquitto()
            case ["systemctl", "restart", "mosquitto"]:
                self.stop()
                self._start()
            case ["systemctl", "reload", "mosquitto"]:
                self._process.send_signal(signal.SIGHUP)
            case ["install", *_]:
                if not self._is_root:  # who can give files to nobody else
                    words = shlex.split(re.sub(r" -[og] \w+", "", shlex.join(words)))
                subprocess.run(words, cwd=self.home, check=True)
                self._name_places()
            case _:
                pytest.fail(f"the README has another command: {line}")

    @property
    def home(self):
        return self.root / "home" / "mosquitto"

    def _name_places(self):
        """The paths in the configuration are those of this root, not of this computer."""
        for path in (self.root / "etc" / "conf.d").glob("*.conf"):
            path.write_text(path.read_text().replace(f"{HOST}/", f"{self.root / 'etc'}/"))

    def _start(self):
        command = [needs_mosquitto(), "-c", str(self.root / "etc" / "mosquitto.conf")]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def stop(self):
        if self._process is not None:
            self._process.terminate()
            self._process.wait(PATIENCE_SECONDS)


@pytest.fixture
def own():
    needs_mosquitto()
    # Not below pytest's folder, which other users cannot enter.
    with tempfile.TemporaryDirectory(prefix="shoal-own-") as root:
        computer = OwnMosquitto(Path(root))
        try:
            yield computer
        finally:
            computer.stop()


def commands_of(folder, title):
    """The commands below a heading of the README."""
    text = (folder / "mosquitto" / "README.md").read_text().split(f"## {title}")[1]
    return re.findall(r"^    ((?:scp|sudo) .*)$", text.split("\n## ")[0], re.MULTILINE)


def test_a_mosquitto_of_ones_own_is_set_up_by_its_readme(own, tmp_path):
    """Every command as it stands; members get in, each to its own topics, and nobody else does."""
    folder = tmp_path / "lab"
    port = free_port()
    broker = f"mqtts://127.0.0.1:{port}"
    init = ["init", "lab", "--folder", str(folder), "--broker", broker]
    assert CliRunner().invoke(app, init).exit_code == 0
    first = read_enrolment(enroll(folder, "pi-1"))
    for line in commands_of(folder, "Set it up"):
        own.type(line, folder)
    assert "shoal.conf" in {path.name for path in (own.root / "etc" / "conf.d").iterdir()}
    assert not {"ca.key", "operator.pem"} & {path.name for path in own.root.rglob("*")}
    config = load_config(folder / "fleet.toml", FleetConfig).resolved(folder)
    assert hosted_broker(config.broker, "lab", tmp_path / "none") is None
    with Server("lab", tmp_path / "store", config.broker), contextlib.ExitStack() as stack:
        status = server_status(
            broker_address(config.broker), "lab", member=member_of(config.broker, "lab")
        )
        assert status is not None
        assert status.online
        clients = Clients(tmp_path, stack)
        server, _ = clients.open(read_enrolment(folder / "server.enrolment"), "server")
        board, inbox = clients.open(first, "pi-1")
        board.subscribe(f"{TOPICS.root}/#")
        assert arrives(server, inbox, TOPICS.task("pi-1"))
        assert not _hears(server, inbox, TOPICS.task("pi-2"))
        for stranger in (
            BrokerAddress("127.0.0.1", port),
            BrokerAddress.parse(broker, ca_file=folder / "ca.pem"),
        ):
            with pytest.raises(TransportError):
                Link(stranger, "x", queue.SimpleQueue()).connect(0.5)
        # A member more, one less, and one with a new enrolment.
        late = read_enrolment(enroll(folder, "pi-2"))
        renewed = read_enrolment(enroll(folder, "pi-1"))
        for line in ["scp -r mosquitto 127.0.0.1:", *commands_of(folder, "After")]:
            own.type(line, folder)
        board_2, inbox_2 = clients.open(late, "pi-2")
        board_2.subscribe(TOPICS.task("pi-2"))
        assert eventually(lambda: server.connected)
        assert arrives(server, inbox_2, TOPICS.task("pi-2"))
        assert clients.is_refused(first, "old")
        assert not board.connected
        clients.open(renewed, "renewed")


def _hears(server, inbox, topic):
    server.publish(topic, b"for another")
    with contextlib.suppress(queue.Empty):
        while True:
            event = inbox.get(timeout=0.5)
            if isinstance(event, Received) and event.topic == topic:
                return True
    return False


def test_a_reload_is_enough_for_a_new_device(own, tmp_path):
    """As the README says: who is there already is not interrupted."""
    folder = tmp_path / "lab"
    found_fleet(folder, NewFleet("lab", "127.0.0.1", url=f"mqtts://127.0.0.1:{free_port()}"))
    for line in commands_of(folder, "Set it up"):
        own.type(line, folder)
    with contextlib.ExitStack() as stack:
        clients = Clients(tmp_path, stack)
        server, heard = clients.open(read_enrolment(folder / "server.enrolment"), "server")
        late = read_enrolment(enroll(folder, "pi-1"))
        after = commands_of(folder, "After")
        assert "`sudo systemctl reload mosquitto`" in (folder / "mosquitto/README.md").read_text()
        for line in ("scp -r mosquitto 127.0.0.1:", after[0], "sudo systemctl reload mosquitto"):
            own.type(line, folder)
        board, inbox = clients.open(late, "pi-1")
        board.subscribe(TOPICS.task("pi-1"))
        assert arrives(server, inbox, TOPICS.task("pi-1"))
        heard.get_nowait()  # that it connected
        assert heard.empty()
