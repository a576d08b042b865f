"""A Mosquitto that sometimes starts and does not listen; a Python program takes its place."""

import sys
import threading
import time

import pytest

from broker_server.service import broker as child_broker
from broker_server.service.authority import enroll, found_fleet, revoke
from broker_server.service.membership import hosted_broker
from broker_server.service.new_fleet import NewFleet
from broker_server.settings.broker import BrokerConfig
from tests.brokers import free_port

PATIENCE_SECONDS = 20.0
# Listens, unless a file beside it says no.
PROGRAM = """\
#!{python}
import pathlib, socket, sys, time
assert sys.argv[1] == "-c"
if not pathlib.Path({mute!r}).exists():
    listener = socket.create_server(("127.0.0.1", {port}))
    while True:
        listener.accept()[0].close()
time.sleep(60)
"""


def eventually(condition):
    """Whether something becomes true within seconds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition() and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    return condition()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The fleet's folder, its configuration, and the file that keeps the program from listening."""
    folder, programs, port = tmp_path / "lab", tmp_path / "programs", free_port()
    programs.mkdir()
    mute = tmp_path / "mute"
    program = programs / "mosquitto"
    program.write_text(PROGRAM.format(python=sys.executable, mute=str(mute), port=port))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    found_fleet(folder, NewFleet("lab", "127.0.0.1", port))
    config = BrokerConfig(url="mosquitto", identity=folder / "server.enrolment", port=port)
    return folder, config, mute


def test_members_are_watched_after_a_restart_that_failed(place, tmp_path, monkeypatch):
    """The thread that watches them restarts the broker, and must not wait for itself."""
    folder, config, mute = place
    for name in ("pi-1", "pi-2"):
        enroll(folder, name)
    with hosted_broker(config, "lab", tmp_path / "broker") as broker:
        first = broker.pid
        monkeypatch.setattr(child_broker, "START_SECONDS", 1.0)
        mute.touch()
        revoke(folder, "pi-1")
        assert eventually(lambda: broker.pid not in {first, None})
        assert eventually(lambda: broker.pid is None)
        mute.unlink()
        monkeypatch.setattr(child_broker, "START_SECONDS", PATIENCE_SECONDS)
        assert broker.ensure()
        assert broker.alive
        first = broker.pid
        revoke(folder, "pi-2")
        assert eventually(lambda: broker.pid not in {first, None} and broker.alive)
