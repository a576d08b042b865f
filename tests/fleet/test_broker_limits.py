"""A broker that refuses: what is too large for it goes in smaller chunks, and what it forbids is
named by the board, the server and the store.
"""

import contextlib
import time

import pytest

from broker_server.store import Store, TaskPhase, queries
from fleet_protocol.control import UpdateRefused
from fleet_protocol.errors import BrokerRefusedError, ConfigError, RefusalReason
from shoal.local_fleet import LocalDevice
from tests.brokers import mosquitto_broker
from tests.device_runtime.device_process import DeviceProcess
from tests.fleet.conftest import Watcher, run
from tests.refusing_brokers import FORTY_KB, dynamic_security, quota_broker


def log_lines(folder, kind):
    """What the log of a store says of a kind."""
    with contextlib.closing(Store(folder)) as store:
        return [line.detail for line in queries.log(store) if line.kind == kind]


def tasks_of(folder, finished):
    """The tasks of the first round of a run."""
    with contextlib.closing(Store(folder)) as store:
        return store.tasks(finished.run, 1)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("max_packet_size 40000", marks=pytest.mark.slow),
        "message_size_limit 30000",
    ],
    ids=["announced", "refused"],
)
def test_a_server_cuts_chunks_that_its_broker_takes(ground, tmp_path, line):
    """Mosquitto says what it takes, or refuses what is larger: the server stood still."""
    with mosquitto_broker(tmp_path, more=line) as broker, ground.fleet(broker.url):
        config = ground.config(broker.url, rounds=1, retries=1)
        assert run(config, Watcher()).status == "finished"
    (smaller,) = log_lines(config.store, "smaller-chunks")
    assert "the broker refuses chunks of 98,304" in smaller


def test_a_broker_that_takes_no_chunk_ends_the_run_at_once(ground, tmp_path):
    """The error names the limit and the setting of the broker."""
    with (
        mosquitto_broker(tmp_path, more="max_packet_size 1500") as broker,
        pytest.raises(ConfigError, match=r"packets of 1,500 bytes.*max_packet_size"),
    ):
        run(ground.config(broker.url, rounds=1), Watcher())


@pytest.mark.parametrize(
    "answer",
    [b"\xe0\2\x95\0", pytest.param(b"", marks=pytest.mark.slow)],
    ids=["reason", "silent"],
)
def test_a_board_cuts_its_update_as_its_broker_takes_it(ground, tmp_path, answer):
    """A hosted broker ends the connection for a packet over its quota, which went again and again:
    a board made 0.1 MB/s of it.
    """
    with (
        mosquitto_broker(tmp_path) as broker,
        quota_broker(broker.port, FORTY_KB, answer) as front,
        ground.fleet(front.url, [LocalDevice("device-0", ground.data / "device-0.npz", 1.0)]),
    ):
        config = ground.config(broker.url, rounds=1, min_devices=1, retries=1)
        finished = run(config, Watcher())
        assert finished.status == "finished"
        (task,) = tasks_of(config.store, finished)
        assert task.phase is TaskPhase.MERGED
        # Chunks of 96 and of 48 kB are refused, one of each where the broker gives its reason.
        assert front.ended <= (2 if answer else 9)
        sent = front.bytes
        time.sleep(2.0)
        assert front.bytes - sent < 1000


def test_a_board_that_may_not_fetch_says_so_and_its_round_does_not_wait(ground, tmp_path):
    """Its subscription to blobs was refused, and it asked for ever."""
    rights = [
        "publish shoal/#",
        "subscribe shoal/v1/test/devices/#",
        "subscribe shoal/v1/test/server/#",
    ]
    with (
        dynamic_security(tmp_path, rights) as broker,
        ground.fleet(
            broker.login("board"), [LocalDevice("device-0", ground.data / "device-0.npz", 1.0)]
        ),
    ):
        watcher = Watcher()
        config = ground.config(
            broker.login("server"),
            rounds=1,
            min_devices=1,
            retries=1,
        )
        began = time.monotonic()
        assert run(config, watcher).status == "failed"
    assert time.monotonic() - began < 50  # its deadline is at 60 s
    refused = watcher.events_of(UpdateRefused)[0]
    assert (refused.device, refused.reason) == ("device-0", RefusalReason.REFUSED_BY_BROKER)
    assert "refuses the subscription to shoal/v1/test/blobs/" in refused.detail
    assert "Not authorized" in refused.detail


def test_a_server_that_may_not_subscribe_says_so_at_its_start(ground, tmp_path):
    """It saw no board, and did not know why."""
    with (
        dynamic_security(tmp_path, ["publish shoal/#"]) as broker,
        pytest.raises(BrokerRefusedError, match=r"subscription to shoal/.*Not authorized"),
    ):
        run(ground.config(broker.login("board"), rounds=1), Watcher())


def test_a_board_whose_broker_refuses_it_is_not_asked_in_every_round(ground, tmp_path):
    """Beside a board that trains, it made 1.2 kB and six lines a round, and 60 rounds take a
    minute.
    """
    rights = [
        "publish shoal/#",
        "subscribe shoal/v1/test/devices/#",
        "subscribe shoal/v1/test/server/#",
    ]
    data = {"kind": "npz", "path": str(ground.data / "device-0.npz")}
    with (
        dynamic_security(tmp_path, rights) as broker,
        quota_broker(broker.port, 10**9, b"") as front,
    ):
        own = front.url.replace("mqtt://", "mqtt://board:board@")
        bad = DeviceProcess(tmp_path / "bad", own, data, device="bad", fleet="test")
        good = DeviceProcess(
            tmp_path / "good", broker.login("server"), data, device="good", fleet="test"
        )
        try:
            for device in (bad, good):
                device.start()
                device.wait_log("state=idle")
            lines = len(bad.log().splitlines())
            passed = front.bytes
            config = ground.config(broker.login("server"), rounds=12, min_devices=1)
            assert run(config, Watcher()).status == "finished"
            assert bad.log().count("refused: refused-by-broker") == 1
            assert len(bad.log().splitlines()) - lines <= 10
            assert front.bytes - passed <= 10_000
        finally:
            bad.kill()
            good.kill()
    with contextlib.closing(Store(config.store)) as store:
        assert [line.device for line in store.refusals()] == ["bad"]


def test_a_server_that_may_not_address_a_board_asks_it_once(ground, tmp_path):
    """The other board trains in every round; some brokers end the server's connection each time."""
    rights = [
        "subscribe shoal/#",
        "publish shoal/v1/test/server/#",
        "publish shoal/v1/test/blobs/#",
        "publish shoal/v1/test/devices/good/#",
    ]
    data = {"kind": "npz", "path": str(ground.data / "device-0.npz")}
    with dynamic_security(tmp_path, rights) as broker:
        boards = []
        for name in ("bad", "good"):
            folder = tmp_path / name
            boards.append(
                DeviceProcess(folder, broker.login("server"), data, device=name, fleet="test")
            )
        try:
            for device in boards:
                device.start()
                device.wait_log("state=idle")
            config = ground.config(broker.login("board"), rounds=4, min_devices=1)
            watcher = Watcher()
            assert run(config, watcher).status == "finished"
        finally:
            for device in boards:
                device.kill()
    (refused,) = watcher.events_of(UpdateRefused)
    assert (refused.device, refused.reason) == ("bad", RefusalReason.REFUSED_BY_BROKER)
    assert "shoal/v1/test/devices/bad/task (Not authorized)" in refused.detail


def test_a_server_that_may_not_announce_itself_trains_and_says_so(ground, tmp_path):
    """The broker ended its connection with each status, and the run stood still for ever."""
    rights = [
        "subscribe shoal/#",
        "publish shoal/v1/test/blobs/#",
        "publish shoal/v1/test/devices/#",
    ]
    boards = [LocalDevice("device-0", ground.data / "device-0.npz", 1.0)]
    with (
        dynamic_security(tmp_path, rights) as broker,
        ground.fleet(broker.login("server"), boards),
    ):
        config = ground.config(broker.login("board"), rounds=2, min_devices=1)
        assert run(config, Watcher()).status == "finished"
    refusals = "\n".join(log_lines(config.store, "broker-refuses"))
    assert "shoal/v1/test/server/status (Not authorized)" in refusals
