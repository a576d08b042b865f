"""A board of an enrolled fleet whose clock is far off trains, and the server names it."""

import os

import pytest

from broker_server.service.authority import NewFleet, enroll, found_fleet
from broker_server.service.clocks import EVENT, Clocks
from broker_server.settings.broker import BrokerConfig
from tests.brokers import mosquitto_broker
from tests.device_runtime.device_process import REPOSITORY, DeviceProcess
from tests.fleet.conftest import Watcher, run
from tests.fleet.test_broker_limits import log_lines

DAY = 86_400
# What Python runs before the agent, in place of another clock.
CLOCKS = {
    "stopped in 1970": "import time\nnow = time.time\nfirst = now()\ntime.time = lambda: 300 + now() - first",
    "a day ahead": f"import time\nnow = time.time\ntime.time = lambda: now() + {DAY}",
}


@pytest.mark.parametrize(
    ("clock", "words"),
    [
        ("stopped in 1970", r" days behind the server's"),
        pytest.param("a day ahead", "24 hours ahead of the server's", marks=pytest.mark.slow),
    ],
)
def test_the_server_names_a_board_whose_clock_is_far_off(ground, tmp_path, clock, words):
    """Once in a run; its updates count."""
    folder = tmp_path / "lab"
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "sitecustomize.py").write_text(CLOCKS[clock])
    data = {"kind": "npz", "path": str(ground.data / "device-0.npz")}
    with mosquitto_broker(tmp_path) as broker:
        found_fleet(folder, NewFleet("test", "127.0.0.1", broker.port, broker.url))
        own = enroll(folder, "pi-1")
        device = DeviceProcess(
            tmp_path / "board",
            broker.url,
            data,
            fleet="test",
            retry_seconds=1.0,
            **{"identity.file": str(own)},
        )
        device.start(prefix=("env", f"PYTHONPATH={tmp_path / 'lib'}{os.pathsep}{REPOSITORY}"))
        try:
            config = ground.config(broker.url, rounds=2, min_devices=1).model_copy(
                update={
                    "broker": BrokerConfig(url=broker.url, identity=folder / "server.enrolment")
                }
            )
            assert run(config, Watcher()).status == "finished"
        finally:
            device.kill()
    (line,) = log_lines(config.store, EVENT)
    assert words in line
    assert "timedatectl set-ntp true" in line


class Notes:
    """What a server would write into its log."""

    def __init__(self):
        self.lines = []

    def note(self, kind, detail, number, device):
        self.lines.append((kind, device, detail.split(";")[0]))


def test_what_is_slow_on_its_way_is_no_wrong_clock(monkeypatch):
    """An answer was given after the offer, however late either arrives; half an hour is no fault."""
    monkeypatch.setattr("time.time", lambda: 1_000_000.0)
    monkeypatch.setattr("time.monotonic", lambda: 50_000.0)
    notes = Notes()
    clocks = Clocks(notes)
    for answered in (None, 1_000_000, 999_000, 1_001_800, 1_000_000 - 43_000):
        clocks.check("pi-1", 1, answered, offered=50_000.0 - 40_000)
    assert notes.lines == []
    clocks.check("pi-1", 1, 1_000_000 + 7_300, offered=10_000.0)
    clocks.check("pi-1", 2, 1_000_000 + 7_300, offered=10_000.0)
    clocks.check("pi-2", 2, 1_000_000 - 40_000 - 3 * DAY, offered=10_000.0)
    assert notes.lines == [
        (EVENT, "pi-1", "its clock is 2 hours ahead of the server's"),
        (EVENT, "pi-2", "its clock is 3 days behind the server's"),
    ]
