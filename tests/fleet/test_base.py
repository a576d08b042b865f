"""Boards that train adapters of unequal rank over a broker: the frozen base is fetched once, the
updates are small.
"""

import numpy as np
import pytest

from broker_server.settings.fleet import FleetConfig
from fleet_protocol import control
from fleet_protocol.manifest import BASE, parse_manifest
from models import infer_layout
from shoal.local_fleet import LocalDevice, LocalFleet
from simulation.data.datasets import load_dataset
from tests.adapted import adapted
from tests.brokers import mosquitto_broker
from tests.fleet.conftest import Watcher, run, start_accuracy
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.recipe import Recipe

pytestmark = pytest.mark.slow
LIMITS = (1.0, 0.5, 0.25)
SETTINGS = {"hidden": 600}


def test_boards_of_unequal_rank_share_a_base_that_each_fetches_once(tmp_path):
    """Three rounds: accuracy rises by a third; each board asks once for the base, and sends
    adapters and head alone.
    """
    data = load_dataset("digits")
    devices = []
    for number, width in enumerate(LIMITS):
        part = slice(number * 200, (number + 1) * 200)
        np.savez(tmp_path / f"device-{number}.npz", x=data.train_x[part], y=data.train_y[part])
        devices.append(LocalDevice(f"device-{number}", tmp_path / f"device-{number}.npz", width))
    np.savez(tmp_path / "test.npz", x=data.test_x, y=data.test_y)
    layout = infer_layout(adapted, SETTINGS)
    tiers = [layout.tier(width) for width in LIMITS]
    export_architecture(
        ExportRequest(adapted, SETTINGS, tiers, Recipe()),
        tmp_path / "artifacts",
        ExportOptions(formats=("onnx",)),
    )
    manifest = parse_manifest(
        (tmp_path / "artifacts" / "adapted" / tiers[0].id / "manifest.json").read_bytes()
    )
    base = manifest.files[BASE]
    watcher = Watcher()
    with (
        mosquitto_broker(tmp_path) as broker,
        LocalFleet(
            tmp_path / "devices", fleet="adapters", broker=broker.url, devices=devices
        ) as fleet,
    ):
        config = FleetConfig.model_validate(
            {
                "fleet": "adapters",
                "store": tmp_path / "store",
                "broker": {"url": broker.url},
                "model": {"artifacts": tmp_path / "artifacts", "arch": "adapted"},
                "round": {
                    "rounds": 3,
                    "min_devices": 3,
                    "deadline_seconds": 60.0,
                    "nudge_seconds": 5.0,
                },
                "train": {"learning_rate": 0.1, "epochs": 3, "batch_size": 16},
                "evaluation": {"data": {"kind": "npz", "path": tmp_path / "test.npz"}},
            }
        )
        before = start_accuracy(config)
        finished = run(config, watcher)
        fleet.check()
    assert finished.status == "finished", finished.error
    judged = watcher.events_of(control.RoundClosed)
    assert judged[-1].evaluation.accuracy > before + 0.33
    for device in devices:
        log = (tmp_path / "devices" / f"{device.name}.log").read_text()
        assert log.count(f"fetched {base.digest[:12]}") == 1, log
    updates = list((tmp_path / "store" / "blobs" / "objects").rglob("*"))
    assert all(path.stat().st_size < base.size / 4 for path in updates if path.is_file())
