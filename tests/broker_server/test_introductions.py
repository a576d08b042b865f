"""A server asks devices again who they are: whose profile was lost, and whom a stranger hides."""

import contextlib
import queue
import threading
import time

import pytest

from broker_server.rounds.fleet import Fleet
from broker_server.service import introductions
from broker_server.service.introductions import Introductions
from broker_server.service.server import Server
from broker_server.settings.broker import BrokerConfig
from fleet_protocol.link import Link
from fleet_protocol.messages import (
    DeviceProfile,
    DeviceStatus,
    Introduce,
    parse_server_message,
)
from fleet_protocol.topics import Topics
from fleet_protocol.transport import BrokerAddress, Received
from tests.broker_server.peer import profile
from tests.brokers import mosquitto_broker

TOPICS = Topics("lab")


def status(device, online=True):
    return DeviceStatus(fleet="lab", device=device, online=online, state="idle")


class Scene:
    """Introductions on a clock of the test."""

    def __init__(self, members=None):
        self.fleet = Fleet()
        self.asked = []
        self.now = 100.0
        self.introductions = Introductions(self.fleet, lambda: members, self.asked.append)

    def pass_time(self, seconds, connected=True):
        """Return who is asked meanwhile."""
        self.asked.clear()
        end = self.now + seconds
        while self.now < end:
            self.introductions.follow(self.now, connected=connected)
            self.now += 0.5
        return sorted(self.asked)


def test_a_device_without_a_profile_is_asked_less_and_less_often():
    """Six times in the first hour, about, and no more once it has said what it is."""
    scene = Scene()
    scene.fleet.receive(status("a"))
    assert scene.pass_time(3.0) == []
    assert scene.pass_time(4.0) == ["a"]
    assert 3 <= len(scene.pass_time(3600.0)) <= 10
    scene.fleet.receive(DeviceProfile(fleet="lab", device="a", profile=profile()))
    assert scene.pass_time(3600.0) == []


def test_a_device_that_is_not_online_is_asked_once_for_each_time_it_goes():
    """One that is there answers; one that is gone costs one message."""
    scene = Scene()
    scene.fleet.receive(status("a", online=False))
    scene.fleet.receive(DeviceProfile(fleet="lab", device="a", profile=profile()))
    assert scene.pass_time(600.0) == ["a"]
    scene.fleet.receive(status("a"))
    assert scene.pass_time(600.0) == []
    scene.fleet.receive(status("a", online=False))
    assert scene.pass_time(600.0) == ["a"]
    # What the broker knows may be another thing when it is back.
    scene.pass_time(5.0, connected=False)
    assert scene.pass_time(600.0) == ["a"]


def test_members_are_asked_also_where_nothing_of_them_came():
    """Somebody may have put something else in the place of their retained messages."""
    scene = Scene(members=("a", "b"))
    scene.fleet.receive(status("b"))
    scene.fleet.receive(DeviceProfile(fleet="lab", device="b", profile=profile()))
    assert scene.pass_time(600.0) == ["a"]
    scene.fleet.receive(status("stranger", online=False))
    assert scene.pass_time(600.0) == []


@pytest.fixture
def quick(monkeypatch):
    """Without the time that retained messages get to come."""
    monkeypatch.setattr(introductions, "SETTLING_SECONDS", 0.0)
    monkeypatch.setattr(introductions, "FIRST_PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(introductions, "LOOK_SECONDS", 0.1)


def test_a_server_that_is_up_asks_over_the_broker(tmp_path, quick):
    """A device whose profile was lost stayed online and was never asked again."""
    with mosquitto_broker(tmp_path) as broker, contextlib.ExitStack() as stack:
        inbox = queue.SimpleQueue()
        device = Link(BrokerAddress.parse(broker.url), "pi", inbox)
        device.connect(30)
        stack.callback(device.close)
        device.subscribe(TOPICS.task("pi"))
        device.publish(TOPICS.status("pi"), status("pi").to_bytes(), retain=True)
        server = stack.enter_context(
            Server("lab", tmp_path / "store", BrokerConfig(url=broker.url))
        )
        serving = threading.Thread(target=server.serve)
        serving.start()
        stack.callback(serving.join, 30)
        stack.callback(server.stop)
        deadline = time.monotonic() + 30
        event = None
        while not isinstance(event, Received):
            event = inbox.get(timeout=max(0.1, deadline - time.monotonic()))
        assert isinstance(parse_server_message(event.payload), Introduce)
