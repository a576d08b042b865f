"""A fleet over another transport: neither the server nor a device names MQTT."""

import threading

from device_runtime.agent.loop import Agent
from device_runtime.settings import DeviceConfig
from fleet_protocol import control, transport
from fleet_protocol.transport import Scheme
from tests import memory_transport
from tests.fleet.conftest import Watcher, run


def test_two_rounds_without_a_network(ground, monkeypatch):
    """A transport is one file and one row: with them a server and a device in one process do their
    rounds.
    """
    row = {"memory": Scheme("tests.memory_transport", "MemoryLink", 1)}
    monkeypatch.setattr(transport, "SCHEMES", {**transport.SCHEMES, **row})
    monkeypatch.setattr(memory_transport, "HUBS", {})
    agent = Agent(
        DeviceConfig.model_validate(
            {
                "fleet": "test",
                "device": "device-0",
                "broker": "memory://hub",
                "insecure": True,
                "state_dir": ground.folder / "device-0",
                "data": {"kind": "npz", "path": ground.data / "device-0.npz"},
            }
        )
    )
    thread = threading.Thread(target=agent.run, daemon=True)
    thread.start()
    watcher = Watcher()
    try:
        finished = run(ground.config("memory://hub", rounds=2, min_devices=1), watcher)
    finally:
        agent.stop("the test is over")
        thread.join(20)
    assert finished.status == "finished"
    assert [dict(event.merged) for event in watcher.events_of(control.RoundClosed)] == [
        {"device-0": ground.tiers[0]}
    ] * 2
    assert not thread.is_alive()
