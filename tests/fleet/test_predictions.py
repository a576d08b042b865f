"""`shoal devices predict`: real boards judge samples over a real broker, with identities and
without.
"""

import json
import queue
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

from broker_server.service.launch import predict, run_fleet, steer
from broker_server.service.server import Server
from broker_server.settings.broker import BrokerConfig
from fleet_protocol.errors import ConfigError, ShoalError
from fleet_protocol.link import Link
from fleet_protocol.messages import Ask
from fleet_protocol.transport import BrokerAddress
from shoal.cli.main import main
from tests.brokers import any_broker, free_port, needs_mosquitto
from tests.fleet.conftest import run
from tests.fleet.test_identity import TOPICS, founded, identified, members

PATIENCE = 120.0
TYPED = "shoal devices predict pi-1 --data new.npy"  # in docs/device.md
SERVES = "[predict]\nmqtt = true\n"


def serving(fleet, *names):
    """The agents, some of which may be asked."""
    for name in names:
        fleet._configs[name] += SERVES
    return fleet


@pytest.fixture(params=["open", "enrolled"])
def boards(request, ground):
    """Three boards, of which two may be asked, after a round; with their server, which waits for
    requests.
    """
    with ExitStack() as stack:
        if request.param == "enrolled":
            needs_mosquitto()
            port = free_port()
            folder, enrolments = founded(ground, port)
            config = identified(ground, folder, BrokerConfig(url="mosquitto", port=port), rounds=1)
            started = ground.fleet(f"mqtts://127.0.0.1:{port}", members(ground, enrolments))
        else:
            broker = stack.enter_context(any_broker(ground.folder))
            config = ground.config(broker.url, rounds=1)
            started = ground.fleet(broker.url)
        server = stack.enter_context(Server(config.fleet, config.store, config.broker, own=config))
        if request.param == "enrolled":  # over MQTT, where the members sign
            config = config.model_copy(update={"store": ground.folder / "elsewhere"})
        fleet = stack.enter_context(serving(started, "device-0", "device-1"))
        thread = threading.Thread(target=server.serve)
        thread.start()
        stack.callback(thread.join, 30)
        stack.callback(server.stop)
        assert run_fleet(config).status == "finished"
        yield config, fleet


@pytest.mark.slow
def test_boards_judge_over_the_broker(boards, ground, monkeypatch, capsys):
    """The same as on the board itself; also many at once, beside others who steer; the rest is
    refused.
    """
    config, fleet = boards
    x = np.load(ground.data / "test.npz")["x"][:3]
    np.save(ground.folder / "new.npy", x)
    here = [
        sys.executable,
        "-m",
        "device_runtime",
        "predict",
        "--json",
        "--config",
        fleet._config("device-1"),
    ]
    done = subprocess.run(
        [*here, "--data", ground.folder / "new.npy"],
        capture_output=True,
        check=True,
        timeout=PATIENCE,
    )
    wanted = json.loads(done.stdout)
    monkeypatch.setattr("shoal.cli.serving.read_fleet", lambda *_: config)
    monkeypatch.chdir(ground.folder)
    monkeypatch.setattr(sys, "argv", [*TYPED.replace("pi-1", "device-1").split(), "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert json.loads(capsys.readouterr().out) == wanted
    assert wanted["model"].keys() == {"run", "round", "version", "tier", "digest"}

    def ask(device="device-1", rows=x):
        return predict(config, device, {"x": rows.tolist()}, PATIENCE)

    with pytest.raises(ConfigError, match=r"malformed: .*cannot become `shape` \[1, 8, 8\]"):
        ask(rows=np.zeros((2, 5)))
    with pytest.raises(ConfigError, match="unknown-device"):
        ask("device-9")
    with pytest.raises(
        ConfigError, match=r"device-2 makes no predictions, unsupported: .*mqtt = true"
    ):
        ask("device-2")
    fleet.processes["device-0"].kill()
    begun = time.monotonic()
    with pytest.raises(ConfigError, match="device-0 makes no predictions, away"):
        ask("device-0")
    assert time.monotonic() - begun < PATIENCE / 2

    def steered():
        with pytest.raises(ShoalError, match="no run is in progress"):
            steer(config, "pause")

    with ThreadPoolExecutor(4) as pool:  # who asks at the same time is heard, each of them
        others = [pool.submit(steered) for _ in range(2)]
        asked = [pool.submit(ask) for _ in range(4)]
        assert [
            json.loads(json.dumps(item.result(PATIENCE).model_dump()["predictions"]))
            for item in asked
        ] == [wanted["predictions"]] * 4
        [other.result(PATIENCE) for other in others]


@pytest.mark.attack(
    "outsider",
    "Requests a prediction from a device in an enrolled fleet",
    "refused as `forged`; no device answers",
    "2026-11-23",
)
@pytest.mark.slow
def test_a_stranger_asks_nothing(ground):
    """A request that nobody has signed reaches neither server nor board, on a broker that lets
    everybody speak.
    """
    with any_broker(ground.folder) as broker:
        folder, enrolments = founded(ground, broker.port)
        config = identified(ground, folder, BrokerConfig(url=broker.url), rounds=1)
        fleet = serving(ground.fleet(broker.url, members(ground, enrolments)), "device-1")
        link = Link(BrokerAddress.parse(broker.url), "stranger", queue.SimpleQueue())
        with fleet:
            assert run(config, lambda _event: None).status == "finished"
            link.connect(10)
            ask = Ask(task="p1", device="device-1", asked={"x": [[1]]}, seconds=5).to_bytes()
            link.publish(TOPICS.task("device-1"), ask)
            log = ground.folder / "devices" / "device-1.log"
            deadline = time.monotonic() + PATIENCE
            while "refused, forged" not in log.read_text():
                assert time.monotonic() < deadline
                fleet.check()
                threading.Event().wait(0.05)
            link.close()
