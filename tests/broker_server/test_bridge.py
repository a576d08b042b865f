"""A fleet on two brokers that hand each other its messages, as `deploy/bridge.conf` says."""

from pathlib import Path

import pytest

from fleet_protocol import control
from tests.broker_server.peer import Peer, honest
from tests.brokers import mosquitto_broker

LINES = Path(__file__).parents[2] / "deploy" / "bridge.conf"


@pytest.fixture
def central(tmp_path):
    (tmp_path / "central").mkdir()
    with mosquitto_broker(tmp_path / "central") as broker:
        yield broker


def test_a_run_over_two_brokers_of_which_one_is_killed(central, config, running, fleet, tmp_path):
    """Every round has the updates of the boards at either; what the bridge lost is asked for
    again.
    """
    lines = (
        LINES.read_text()
        .replace("central:1883", f"127.0.0.1:{central.port}")
        .replace("/lab/", f"/{fleet}/")
    )
    assert fleet in lines
    settings = config(
        round={"rounds": 4, "min_devices": 2, "quorum": 1.0, "deadline_seconds": 120},
        evaluation={"data": None},
    )
    with (
        mosquitto_broker(tmp_path, more=lines.replace("max_queued_messages 0\n", "")) as site,
        Peer(fleet, "here", central.url, honest(1.0)),
        Peer(fleet, "there", site.url, honest(2.0)),
    ):
        server = running(settings, central.url)
        server.wait_event(control.RoundClosed, timeout_seconds=60)
        site.stop()
        site.start()
        assert server.wait(240).status == "finished"
    assert [sorted(event.merged) for event in server.events_of(control.RoundClosed)] == [
        ["here", "there"]
    ] * 4
