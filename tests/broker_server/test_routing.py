"""Messages find their handlers in an idle server as in one with a run, and none of them ends it."""

import contextlib
import queue
import threading
import time

import pytest

from broker_server.rounds.fleet import Fleet
from broker_server.service.control import Control
from broker_server.service.launch import run_fleet
from broker_server.store import Store
from fleet_protocol.errors import RefusalReason
from fleet_protocol.link import Link
from fleet_protocol.messages import DeviceStatus
from fleet_protocol.topics import Topics
from fleet_protocol.transport import BrokerAddress
from tests.broker_server.peer import Peer, honest
from tests.broker_server.test_launch import Serving

PATIENCE_SECONDS = 60


@pytest.fixture
def settings(url, config):
    return config(evaluation={"data": None}, broker={"url": url, "insecure": True})


@pytest.fixture
def publish(url, fleet):
    """Publishes a payload on a topic of the fleet, as anybody at the broker can."""
    link = Link(BrokerAddress.parse(url), f"anybody-{fleet}", queue.SimpleQueue())
    with contextlib.closing(link):
        link.connect()
        yield link.publish


def stored_refusals(settings):
    with contextlib.closing(Store(settings.store, read_only=True)) as store:
        return [(line.device, line.reason, line.count) for line in store.refusals()]


def stored_details(settings):
    with contextlib.closing(Store(settings.store, read_only=True)) as store:
        return [event.detail for event in store.events()]


def wait_for_refusals(settings, expected):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while stored_refusals(settings) != expected:
        assert time.monotonic() < deadline, stored_refusals(settings)
        threading.Event().wait(0.05)


def test_an_unexpected_exception_does_not_end_an_idle_server(
    url, settings, fleet, publish, monkeypatch
):
    """It is counted and logged with the topic; the server does the next run that is requested."""
    receive = Fleet.receive
    broken = []

    def stumble(self, presence):
        if not broken:
            broken.append(presence.device)
            raise OverflowError("int too large")
        return receive(self, presence)

    monkeypatch.setattr(Fleet, "receive", stumble)
    topic = Topics(fleet).status("odd")
    status = DeviceStatus(fleet=fleet, device="odd", online=True, state="idle")
    with Serving(settings, url):
        publish(topic, status.to_bytes())
        wait_for_refusals(settings, [("", RefusalReason.FAILED, 1)])
        with Peer(fleet, "d", url, honest()):
            finished = run_fleet(settings)
    assert finished.status == "finished"
    assert broken == ["odd"]
    assert f"failed: a message on {topic}: OverflowError: int too large" in stored_details(settings)


def test_an_unexpected_exception_from_a_request_does_not_end_an_idle_server(
    url, settings, fleet, publish, monkeypatch
):
    """A request over MQTT is a message like any other."""
    handle = Control.handle
    broken = []

    def stumble(self, event, carry_out):
        if not broken:
            broken.append(event)
            raise KeyError("request")
        handle(self, event, carry_out)

    monkeypatch.setattr(Control, "handle", stumble)
    with Serving(settings, url), Peer(fleet, "d", url, honest()):
        publish(Topics(fleet).server_control, b"{}")
        wait_for_refusals(settings, [("", RefusalReason.FAILED, 1)])
        assert run_fleet(settings).status == "finished"


def test_a_foreign_presence_is_counted_by_an_idle_server(url, settings, fleet, publish):
    """Nobody can announce another device than the one whose topic it is."""
    status = DeviceStatus(fleet=fleet, device="other", online=True, state="idle")
    with Serving(settings, url):
        publish(Topics(fleet).status("d"), status.to_bytes())
        wait_for_refusals(settings, [("", RefusalReason.UNKNOWN_DEVICE, 1)])
    with contextlib.closing(Store(settings.store)) as store:
        assert not store.known_devices(fleet)
