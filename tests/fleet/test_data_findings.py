"""A board whose data looks different is named before its first update counts, over a real
broker.
"""

import contextlib
import subprocess
import sys

import numpy as np
import pytest

from broker_server.rounds.advice import find_advice
from broker_server.service.data_findings import EVENT
from broker_server.settings.evaluation import EvaluationConfig
from broker_server.store import Store, queries
from fleet_protocol import control
from shoal.local_fleet import LocalDevice
from tests.brokers import embedded_broker
from tests.device_runtime.device_process import REPOSITORY
from tests.fleet.conftest import Watcher, run

TITLE = "The data of 1 of 4 devices may be faulty"


@pytest.fixture
def boards(ground):
    """Four boards, of which the last has pixels up to 255 where all others have 1."""
    with np.load(ground.data / "device-1.npz") as arrays:
        np.savez(ground.folder / "barn.npz", x=arrays["x"] * 255, y=arrays["y"])
    return [*ground.devices(), LocalDevice("barn", ground.folder / "barn.npz", 1.0)]


def shown(store, command):
    """What the command line prints of a store."""
    arguments = [sys.executable, "-m", "shoal", command, "--store", str(store)]
    return subprocess.run(
        arguments, capture_output=True, text=True, check=True, timeout=60, cwd=REPOSITORY
    ).stdout


def test_a_board_with_another_scale_is_named_before_its_first_update_counts(ground, boards):
    """In log, devices and advice, with figures, once; the three others are not."""
    watcher = Watcher()
    seen = {}

    def look():
        with contextlib.closing(Store(ground.folder / "store", read_only=True)) as store:
            seen["merged"] = {view.device.id: view.merged for view in queries.devices(store)}
            seen["advice"] = {found.title: found.evidence for found in find_advice(store)}
            seen["log"] = [
                (line.device, line.detail) for line in queries.log(store) if line.kind == EVENT
            ]

    watcher.once(
        lambda event: isinstance(event, control.UpdateReceived) and event.device == "barn", look
    )
    with embedded_broker(ground.folder) as broker:
        config = ground.config(broker.url, rounds=2, min_devices=4)
        with ground.fleet(broker.url, boards) as agents:
            finished = run(config, watcher)
            agents.check()
    assert finished.status == "finished", finished.error
    assert seen["merged"]["barn"] == 0
    (name, sentence), *more = seen["log"]
    assert (name, more) == ("barn", [])
    assert sentence.startswith(
        "values range from 0 to 255, but the fleet's range from 0 to 1 (their deviation is 2"
    )
    assert sentence.endswith("multiply `scale` in [data] by 0.003922")
    assert seen["advice"][TITLE].startswith(f"barn: {sentence}")

    devices = shown(ground.folder / "store", "devices")
    found = shown(ground.folder / "store", "advice")
    assert devices.replace("\n", " ").count("looks wrong:") == 1
    assert "the data of barn looks wrong: values range from 0 to 255" in devices.replace("\n", " ")
    assert TITLE in found
    assert "barn: values range from 0 to 255" in found.replace("\n", " ")
    log = (ground.folder / "devices" / "barn.log").read_text()
    assert log.count("possible fault in the data: values range from 0 to 255") == 1
    with contextlib.closing(Store(ground.folder / "store", read_only=True)) as store:
        lines = queries.log(store, finished.run)
        of_barn = [line.kind for line in lines if line.device == "barn"]
        assert of_barn.index(EVENT) < of_barn.index("update-received")
        assert of_barn.count(EVENT) == 1
        assert not [
            line for line in lines if line.kind in {EVENT, "no-contract"} and line.device != "barn"
        ]


def test_a_server_without_samples_says_so_once(ground, boards, caplog):
    """Nothing says then what a sample is, so a scale is nobody's; it says how to add that."""
    with embedded_broker(ground.folder) as broker:
        config = ground.config(broker.url, rounds=2, min_devices=1)
        config = config.model_copy(update={"evaluation": EvaluationConfig()})
        with ground.fleet(broker.url, boards[-1:]) as agents:
            finished = run(config, Watcher())
            agents.check()
    assert finished.status == "finished", finished.error
    said = [
        record.message
        for record in caplog.records
        if "no contract defines a sample" in record.message
    ]
    assert len(said) == 1
    assert "[evaluation.data]" in said[0]
    assert "[contract]" in said[0]
    with contextlib.closing(Store(ground.folder / "store", read_only=True)) as store:
        kinds = [line.kind for line in queries.log(store)]
    assert kinds.count("no-contract") == 1
    assert EVENT not in kinds
