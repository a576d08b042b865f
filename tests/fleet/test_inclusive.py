"""InclusiveFL and its baselines in the fleet: six device processes of three depths learn in five
rounds.

The data are SST-2's sentences where they are at hand; without them, as in a bare checkout, the same
fleet reads digits as texts of 16 grey values.
"""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from broker_server.settings.broker import BrokerConfig
from broker_server.settings.evaluation import EvaluationConfig
from broker_server.settings.fleet import FleetConfig, ModelConfig, TrainConfig
from fleet_protocol import control
from fleet_protocol.data import NpzData
from models.registry import Registry, infer_layout
from shoal.local_fleet import LocalDevice, LocalFleet
from simulation.data.dataset import Dataset
from simulation.data.datasets import load_dataset
from simulation.data.partition import iid
from tests.brokers import mosquitto_broker
from tests.fleet.conftest import Watcher, run, start_accuracy
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.optimizers.sgd import Sgd
from trainer_export.recipe import Recipe

ROUNDS = 5
DEPTHS = (3, 2, 1)
LIMITS = (3, 3, 2, 2, 1, 1)
ALL = len(LIMITS)
DATA = Path(os.environ.get("SHOAL_DATA") or Path(__file__).parents[3] / "shared" / "data")

SETTINGS = {
    "train": TrainConfig(learning_rate=0.05, epochs=6, batch_size=16),
    "server_optimizer": {"name": "fedadam", "learning_rate": 0.02, "beta1": 0.5},
}


def sentences() -> Dataset:
    if not (DATA / "sst2").is_dir():
        pytest.skip("SST-2 is not in SHOAL_DATA")
    return load_dataset("sst2", DATA, length=24)


def grey_values() -> Dataset:
    """Digits as texts: 16 tokens, each the mean of four pixels in one of 17 grey values; 0 stays
    padding.
    """
    data = load_dataset("digits")

    def text(images: np.ndarray) -> np.ndarray:
        blocks = images.reshape(-1, 4, 2, 4, 2).mean(axis=(2, 4)).reshape(len(images), -1)
        return (16 * blocks + 1).round().astype(np.int64)

    return replace(data, train_x=text(data.train_x), test_x=text(data.test_x), tokens=18)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(grey_values, id="digits"),
        pytest.param(sentences, id="sst2", marks=pytest.mark.slow),
    ],
)
def reef(request, tmp_path_factory):
    """A broker and six agents, two of each depth."""
    folder = tmp_path_factory.mktemp("reef")
    data = request.param()
    np.savez(folder / "test.npz", x=data.test_x, y=data.test_y)
    devices = []
    for index, part in enumerate(iid(len(data.train_y), len(LIMITS), seed=3)):
        np.savez(folder / f"device-{index}.npz", x=data.train_x[part], y=data.train_y[part])
        devices.append(
            LocalDevice(
                f"device-{index}", folder / f"device-{index}.npz", 1.0, max_depth=LIMITS[index]
            )
        )
    architecture = Registry.zoo().get("text_encoder")
    sizes = {"embed": 32, "ffn": 64, "blocks": DEPTHS[0]}
    shape = {"input_shape": data.input_shape, "classes": data.classes}
    settings = architecture.settings({**sizes, **shape})
    layout = infer_layout(architecture, settings)
    tiers = tuple(layout.tier(1.0, depth) for depth in DEPTHS)
    export_architecture(
        ExportRequest(architecture, settings, tiers, Recipe(Sgd(weight_decay=0.0))),
        folder / "artifacts",
        ExportOptions(formats=("onnx",)),
    )
    with (
        mosquitto_broker(folder) as broker,
        LocalFleet(
            folder / "devices", fleet="reef", broker=broker.url, devices=devices, holdout=0.1
        ) as fleet,
    ):
        yield folder, broker.url, fleet


@pytest.fixture
def trained(reef, tmp_path):
    """Does a run with changed tables; gives what it told, and by how much accuracy rose."""
    folder, url, fleet = reef

    def go(inclusivefl, tier="w1.00-d3", devices=ALL, **tables):
        config = FleetConfig.model_validate(
            {
                "fleet": "reef",
                "store": tmp_path / "store",
                "broker": BrokerConfig(url=url),
                "model": ModelConfig(artifacts=folder / "artifacts", arch="text_encoder"),
                "round": {"rounds": ROUNDS, "min_devices": devices, "nudge_seconds": 5.0},
                "strategy": {"name": "inclusivefl", "inclusivefl": inclusivefl},
                "evaluation": EvaluationConfig(
                    data=NpzData(path=folder / "test.npz"), tier=tier, every=ROUNDS
                ),
                **tables,
            }
        )
        watcher = Watcher()
        finished = run(config, watcher)
        fleet.check()
        assert finished.status == "finished", finished.error
        assert not watcher.events_of(control.UpdateRefused)
        start = start_accuracy(config)
        print(
            f"gain {finished.evaluation.accuracy - start:.3f} to {finished.evaluation.accuracy:.3f}"
        )
        return watcher, finished.evaluation.accuracy - start

    return go


@pytest.mark.slow
def test_three_depths_train_together(trained):
    """Every device trains its own depth with FedAdam behind each group, and the deepest model
    learns.
    """
    watcher, gain = trained({"beta": 0.2}, **SETTINGS)
    tiers = tuple(f"w1.00-d{depth}" for depth in LIMITS)
    assert [tuple(event.merged.values()) for event in watcher.events_of(control.RoundClosed)] == [
        tiers
    ] * ROUNDS
    assert gain > 0.08


# On one data set: all three depths, and each alone, train on both.
@pytest.mark.slow
@pytest.mark.parametrize(
    "reef", [pytest.param(grey_values, id="digits")], indirect=True, scope="module"
)
@pytest.mark.parametrize(
    ("baseline", "devices", "tier"),
    [
        ("without_distillation", 6, "w1.00-d3"),
        ("distillation_only", 6, "w1.00-d3"),
        ("all_large", 2, "w1.00-d3"),
        ("exclusive", 2, "w1.00-d3"),
        ("all_small", 6, "w1.00-d1"),
    ],
)
def test_baselines_run_and_learn(trained, baseline, devices, tier):
    """Each asks the devices that it should; what is judged learns."""
    watcher, gain = trained({"baseline": baseline}, tier=tier, devices=devices, **SETTINGS)
    assert [len(event.merged) for event in watcher.events_of(control.RoundClosed)] == [
        devices
    ] * ROUNDS
    assert gain > 0.03


@pytest.mark.slow
def test_alone_each_device_learns_for_itself(trained):
    """The global model stays as it was, and each device's loss falls round after round."""
    watcher, gain = trained({"baseline": "local"}, train=SETTINGS["train"])
    assert gain == 0.0
    updates = watcher.events_of(control.UpdateReceived)
    first, last = (
        [event.metrics for event in updates if event.round == number] for number in (1, ROUNDS)
    )
    own = np.mean([metrics.evaluation.accuracy for metrics in last])
    print(f"own accuracy {own:.3f}")
    assert own > 0.52
    assert np.mean([metrics.train_loss for metrics in last]) < 0.9 * np.mean(
        [metrics.train_loss for metrics in first]
    )
