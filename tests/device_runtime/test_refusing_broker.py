"""An hour of a board that its broker refuses, with the agent's clock sped up: traffic and log."""

import sys
import time

import numpy as np
import pytest

from tests.brokers import mosquitto_broker
from tests.device_runtime.device_process import DeviceProcess
from tests.device_runtime.tiny_set import samples
from tests.refusing_brokers import dynamic_security, quota_broker

SPEED = 300
HOUR = 3600.0
MOST_BYTES = 10_000
MOST_LINES = 10

# The clock is patched before anything of Shoal is imported, which then goes by it; paho waits for a
# real time between two attempts, which is as much shorter.
SPED_UP = f"""
import sys, time
import paho.mqtt.client  # its own waits are real
real = time.monotonic
time.monotonic = lambda: real() * {SPEED}
from fleet_protocol.link import Link
wait = Link._wait
Link._wait = lambda self, seconds: wait(self, seconds / {SPEED})
from device_runtime.main import main
sys.exit(main(sys.argv[sys.argv.index("--config"):]))
"""


def hour_of(tmp_path, broker, answer, quota, login="", refusal=None):
    """Bytes and lines of a board within an hour after the broker has refused it for the first
    time.

    `refusal` is the line with which the board says so, if the connection need not end.
    """
    x, y = samples(50)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    (tmp_path / "sped_up.py").write_text(SPED_UP)
    with quota_broker(broker.port, quota, answer) as front:
        device = DeviceProcess(
            tmp_path / "device",
            front.url.replace("mqtt://", f"mqtt://{login}"),
            {"kind": "npz", "path": str(tmp_path / "data.npz")},
        )
        device.start(prefix=[sys.executable, str(tmp_path / "sped_up.py")])
        try:
            give_up = time.monotonic() + 60
            while not (front.ended if refusal is None else refusal in device.log()):
                assert time.monotonic() < give_up, device.log()
                time.sleep(0.01)
            bytes_before = front.bytes
            lines_before = len(device.log().splitlines())
            time.sleep(HOUR / SPEED)
            lines = device.log().splitlines()[lines_before:]
            return front.bytes - bytes_before, lines, front.connections
        finally:
            device.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "quota"),
    [(b"", 20), (b"\xe0\2\x97\0", 20), (b"\xe0\2\x87\0", 20), (b"\xe0\2\x95\0", 20)],
    ids=["no-reason", "quota-exceeded", "not-authorised", "packet-too-large"],
)
def test_an_hour_of_a_board_whose_broker_refuses_its_packets_costs_little(tmp_path, answer, quota):
    """It made 9 GB a day and 140 lines a minute."""
    with mosquitto_broker(tmp_path) as broker:
        count, lines, connections = hour_of(tmp_path, broker, answer, quota)
    print(f"{count} bytes, {connections} connections, {len(lines)} lines")
    assert count <= MOST_BYTES, (count, connections)
    assert len(lines) <= MOST_LINES, "\n".join(lines)
    assert sum(map(len, lines)) <= MOST_BYTES
    assert connections <= 13


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rights", "refusal"),
    [
        (["subscribe shoal/#"], "refuses a message of"),
        (["publish shoal/#"], "refuses the subscription to"),
    ],
    ids=["publish", "subscribe"],
)
def test_an_hour_of_a_board_without_rights_costs_little(tmp_path, rights, refusal):
    """It announced itself with each connection, which the broker ended each time."""
    with dynamic_security(tmp_path, rights) as broker:
        count, lines, connections = hour_of(
            tmp_path, broker, b"", 10**9, login="board:board@", refusal=refusal
        )
    print(f"{count} bytes, {connections} connections, {len(lines)} lines")
    assert count <= MOST_BYTES, (count, connections)
    assert len(lines) <= MOST_LINES, "\n".join(lines)
