"""A board that its fleet shuts out says so, asks nobody, and goes on with a new enrolment."""

import contextlib
import os
import threading
import time

import pytest

from broker_server.service.authority import NewFleet, enroll, found_fleet, revoke
from broker_server.service.server import Server
from broker_server.settings.fleet import BrokerConfig
from shoal.local_fleet import LocalDevice
from tests.brokers import mosquitto_broker
from tests.device_runtime.device_process import DeviceProcess
from tests.fleet.boards import until
from tests.refusing_brokers import FORTY_KB, quota_broker, scripted_broker

SESSION = b"\x20\3\0\0\0"
REFUSED = b"\x20\3\0\x87\0"


def put(content, path):
    """Write an enrolment as an operator copies it onto a board."""
    new = path.with_suffix(".new")
    new.touch(0o600)
    new.write_bytes(content)
    new.replace(path)


@contextlib.contextmanager
def up(store, config):
    """A server of the fleet that is up."""
    with Server("test", store, config) as server:
        serving = threading.Thread(target=server.serve)
        serving.start()
        try:
            yield server
        finally:
            server.stop()
            serving.join(60)


@pytest.mark.parametrize("how", ["revoked", "replaced"])
@pytest.mark.slow
def test_a_board_whose_enrolment_counts_no_more_waits_for_a_new_one(ground, tmp_path, how):
    """It was told nothing for ever, where the broker has no login for each board."""
    folder = tmp_path / "lab"
    own = tmp_path / "own.enrolment"
    with mosquitto_broker(tmp_path) as broker, quota_broker(broker.port, FORTY_KB, b"") as front:
        found_fleet(folder, NewFleet("test", "127.0.0.1", broker.port, broker.url))
        put(enroll(folder, "pi-1").read_bytes(), own)
        config = BrokerConfig(url=broker.url, identity=folder / "server.enrolment")
        device = LocalDevice("pi-1", ground.data / "device-0.npz", 1.0, enrolment=own)
        log = ground.folder / "devices" / "pi-1.log"
        with up(ground.folder / "store", config), ground.fleet(front.url, [device]):
            until(lambda: "state=idle" in log.read_text())
            if how == "revoked":
                revoke(folder, "pi-1")
            else:
                enroll(folder, "pi-1")
            until(lambda: "is no longer valid" in log.read_text())
            until(lambda: "does not contact the broker meanwhile" in log.read_text(), log.read_text)
            lines = log.read_text().splitlines()
            sent = front.bytes
            time.sleep(3.0)
            assert front.bytes - sent < 100
            assert log.read_text().splitlines() == lines
            put(enroll(folder, "pi-1").read_bytes(), own)
            until(lambda: log.read_text().count("state=idle") == 2, log.read_text)


def test_a_board_that_was_shut_out_asks_nobody_when_it_starts_again(ground, tmp_path):
    """What it has received lies beside its enrolment."""
    folder = tmp_path / "lab"
    own = tmp_path / "own.enrolment"
    with mosquitto_broker(tmp_path) as broker:
        found_fleet(folder, NewFleet("test", "127.0.0.1", broker.port, broker.url))
        put(enroll(folder, "pi-1").read_bytes(), own)
        config = BrokerConfig(url=broker.url, identity=folder / "server.enrolment")
        device = LocalDevice("pi-1", ground.data / "device-0.npz", 1.0, enrolment=own)
        log = ground.folder / "devices" / "pi-1.log"
        with up(ground.folder / "store", config), ground.fleet(broker.url, [device]) as agents:
            until(lambda: "state=idle" in log.read_text())
            revoke(folder, "pi-1")
            until(lambda: "does not contact the broker" in log.read_text(), log.read_text)
            agents.processes["pi-1"].kill()
            agents.processes["pi-1"].wait(10)
            agents.start("pi-1")
            until(lambda: log.read_text().count("does not contact the broker") == 2, log.read_text)
            assert log.read_text().count("state=probing") == 1


def test_a_service_whose_login_is_refused_asks_once_and_waits_for_another(ground, tmp_path):
    """A service manager starts it again and again: 360 times an hour, each with a packet and some
    lines.
    """
    accepted = threading.Event()
    asked = []

    def answer():
        asked.append(time.monotonic())
        return SESSION if accepted.is_set() else REFUSED

    data = {"kind": "npz", "path": str(ground.data / "device-0.npz")}
    with scripted_broker({0x10: answer}) as url:
        device = DeviceProcess(tmp_path / "board", url, data, retry_seconds=1.0)
        device.start(prefix=("env", f"NOTIFY_SOCKET={tmp_path / 'notify'}"))
        try:
            device.wait_log("does not contact the broker")
            time.sleep(3.0)
            assert len(asked) == 1
            assert device.log().count("\n") <= 10
            assert "Not authorized" in device.log()
            accepted.set()
            # The operator has changed the file.
            os.utime(device.config)
            device.wait_log("state=probing", times=2)
        finally:
            device.kill()


def test_a_person_who_starts_a_board_reads_why_its_login_is_refused(ground, tmp_path):
    """At once, in one line, with an exit code: it was tried for 30 s, and said "Is it running?"."""
    data = {"kind": "npz", "path": str(ground.data / "device-0.npz")}
    with scripted_broker({0x10: REFUSED}) as url:
        device = DeviceProcess(tmp_path / "board", url, data)
        device.start()
        assert device.wait_exit() == 5
        (line,) = [line for line in device.log().splitlines() if line.startswith("error:")]
    assert "Not authorized" in line
    assert "Is it running" not in line
