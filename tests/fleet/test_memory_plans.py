"""A board with little memory trains by a plan of its tier, and the run keeps its bits."""

import json
from dataclasses import replace

import numpy as np
import pytest

from broker_server.settings.fleet import FleetConfig
from broker_server.store import Store
from device_runtime.agent.memory import Load
from fleet_protocol import control
from fleet_protocol.manifest import parse_manifest
from fleet_protocol.memory_plans import PLAN_FILES, plan_text
from models.registry import Registry
from models.tier import Tier
from shoal.local_fleet import LocalDevice, LocalFleet
from simulation.data.datasets import load_dataset
from tests.brokers import any_broker
from tests.fleet.conftest import Watcher, run
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.recipe import Recipe

pytestmark = pytest.mark.slow
TIER = Tier(1.0, 1)
SETTINGS = {"channels": [16, 32], "input_shape": [1, 8, 8]}
BOARDS = ("roomy", "small")


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Digits for two boards, and a set whose tier has a plan for nine tenths of its memory."""
    folder = tmp_path_factory.mktemp("planned")
    data = load_dataset("digits")
    for number, name in enumerate(BOARDS):
        part = slice(number * 100, (number + 1) * 100)
        np.savez(folder / f"{name}.npz", x=data.train_x[part], y=data.train_y[part])
    request = ExportRequest(Registry.zoo().get("conv"), SETTINGS, [TIER], Recipe())
    options = ExportOptions(formats=("onnx",))
    export_architecture(request, folder / "without-plans", options)
    whole = manifest_of(folder / "without-plans", "manifest.json")
    request = replace(request, memory=(0.9 * whole.peak_memory_bytes,))
    export_architecture(request, folder / "artifacts", options)
    return folder


def manifest_of(artifacts, name):
    """A manifest of the tier."""
    return parse_manifest((artifacts / "conv" / TIER.id / name).read_bytes())


def run_two_rounds(planned, folder, remembered=""):
    """Return the digests of the versions of a run with both boards, and the small board's log.

    Args:
        planned: folder of data and artifacts.
        folder: of this run.
        remembered: the small board's record of memory; empty for none.
    """
    devices = []
    for name in BOARDS:
        devices.append(LocalDevice(name, planned / f"{name}.npz", 1.0))
    if remembered:
        state = folder / "devices" / "small"
        state.mkdir(parents=True)
        (state / "memory.json").write_text(remembered)
    folder.mkdir(exist_ok=True)
    watcher = Watcher()
    with (
        any_broker(folder) as broker,
        LocalFleet(folder / "devices", fleet="plans", broker=broker.url, devices=devices) as fleet,
    ):
        config = FleetConfig.model_validate(
            {
                "fleet": "plans",
                "store": folder / "store",
                "broker": {"url": broker.url},
                "model": {"artifacts": planned / "artifacts", "arch": "conv"},
                "round": {"rounds": 2, "min_devices": 2, "deadline_seconds": 60.0},
                "train": {"learning_rate": 0.1, "epochs": 1, "batch_size": 16},
            }
        )
        finished = run(config, watcher)
        fleet.check()
    assert finished.status == "finished", finished.error
    for closed in watcher.events_of(control.RoundClosed):
        assert dict(closed.merged) == dict.fromkeys(BOARDS, TIER.id)
    store = Store(folder / "store", read_only=True)
    try:
        (record,) = store.runs()
        digests = [version.digest for version in store.versions(record.id)]
    finally:
        store.close()
    return digests, (folder / "devices" / "small.log").read_text()


def test_a_board_whose_step_was_killed_trains_by_a_plan_with_the_same_bits(planned, tmp_path):
    """The kernel has killed its step of the whole tier once, so it gets the tier's plan, says what
    it repeats, and the versions of the run have the bits of a run without a kill.
    """
    whole = manifest_of(planned / "artifacts", "manifest.json")
    (path,) = (planned / "artifacts" / "conv" / TIER.id).glob(PLAN_FILES)
    plan = manifest_of(planned / "artifacts", path.name)
    assert plan.peak_memory_bytes < 0.9 * whole.peak_memory_bytes
    # A board that cannot measure its free memory does not try again as soon as it has more.
    killed = Load(phase="training", tier=TIER.id, peak=whole.peak_memory_bytes, free=0, kills=0)
    # `rest` is the number of tasks before the board tries the whole step again.
    remembered = json.dumps({"too_large": killed.model_dump(), "rest": 8, "times": 1})
    undisturbed, log = run_two_rounds(planned, tmp_path / "undisturbed")
    assert plan_text(whole) in log
    limited, log = run_two_rounds(planned, tmp_path / "limited", remembered)
    assert plan_text(plan) in log
    assert plan_text(whole) not in log
    assert limited == undisturbed
    assert len(set(limited)) == 3
