"""FML across shapes: personal models of four architectures in one run, and boards with other
classes than the fleet's.

Specification 5.4 and 5.6. The digits are drawn with 16x16 pixels, which LeNet-5 needs, and the
networks are thin, so that one processor trains them in seconds.
"""

import numpy as np
import pytest

from broker_server.settings.fleet import FleetConfig
from broker_server.store import Store, queries
from fleet_protocol import control
from fleet_protocol.mapped_tensors import tensors_in
from models.registry import Registry, infer_layout
from shoal.local_fleet import LocalDevice, LocalFleet
from simulation.data.datasets import load_dataset
from simulation.data.partition import iid
from tests.brokers import mosquitto_broker
from tests.fleet.conftest import Watcher, run, start_accuracy
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.pair_set import Pair, PairModel, export_pairs
from trainer_export.recipe import Recipe

pytestmark = pytest.mark.slow

ROUNDS = 5
SHAPE = {"input_shape": (1, 16, 16)}
NETWORKS = {
    "mlp": {"hidden": (64,)},
    "lenet5": {"hidden": (60, 42)},
    "cnn1": {"hidden": (60,)},
    "cnn2": {"channels": (16, 16, 16)},
}
ZOO = Registry.zoo()


def network(name, classes=10):
    architecture = ZOO.get(name)
    settings = architecture.settings(SHAPE | NETWORKS[name] | {"classes": classes})
    return PairModel(architecture, infer_layout(architecture, settings).tier(1.0), settings)


def pair(folder, meme, personal, classes=10, adaptor=()):
    """A mutual set; its folder."""
    both = Pair(network(meme, classes), network(personal, classes), adaptor)
    (report,) = export_pairs([both], Recipe(), folder / "sets", name=f"{meme}+{personal}-{classes}")
    return report.folder


def export_fleet(folder, name):
    model = network(name)
    export_architecture(
        ExportRequest(model.arch, model.settings, (model.tier,), Recipe()),
        folder / "artifacts",
        ExportOptions(formats=("onnx",)),
    )


def large(x):
    """Digits of 8x8 pixels, each twice as high and wide."""
    return x.repeat(2, axis=2).repeat(2, axis=3)


def numbers(x, y, count, endings, seed):
    """Numbers of two digits side by side, 20 of the 100: those with one of two endings; the label
    is the number.
    """
    draw = np.random.default_rng(seed)
    tens = draw.integers(0, len(y), count)
    ones = draw.choice(np.flatnonzero(np.isin(y, endings)), count)
    return np.concatenate([x[tens], x[ones]], axis=3).repeat(2, axis=2), 10 * y[tens] + y[ones]


def config(folder, url, arch, **tables):
    base = {
        "fleet": "shapes",
        "store": folder / "store",
        "broker": {"url": url},
        "model": {"artifacts": folder / "artifacts", "arch": arch},
        "round": {"rounds": ROUNDS, "min_devices": 5, "quorum": 1.0, "nudge_seconds": 2.0},
        "train": {"learning_rate": 0.05, "epochs": 3, "batch_size": 16},
    }
    return FleetConfig.model_validate(base | tables)


def local_fleet(folder, url, parts):
    """Agents of data and mutual sets."""
    devices = []
    for index, (x, y, chosen) in enumerate(parts):
        np.savez(folder / f"device-{index}.npz", x=x, y=y)
        devices.append(
            LocalDevice(f"device-{index}", folder / f"device-{index}.npz", 1.0, own_model=chosen)
        )
    return LocalFleet(folder / "devices", fleet="shapes", broker=url, devices=devices, holdout=0.2)


def accuracies(watcher, number):
    """What each device reports of its personal model."""
    updates = [
        event for event in watcher.events_of(control.UpdateReceived) if event.round == number
    ]
    return {event.device: event.metrics.evaluation.accuracy for event in updates}


def test_four_architectures_learn_in_one_run(tmp_path):
    """A global LeNet-5, taught by an MLP, a LeNet-5, a CNN1 and two CNN2: it learns, and so does
    each of them.
    """
    data = load_dataset("digits")
    export_fleet(tmp_path, "lenet5")
    names = ["mlp", "lenet5", "cnn1", "cnn2", "cnn2"]
    sets = {name: pair(tmp_path, "lenet5", name) for name in dict.fromkeys(names)}
    parts = [
        (large(data.train_x[part]), data.train_y[part], sets[name])
        for name, part in zip(names, iid(len(data.train_y), len(names), seed=3), strict=True)
    ]
    np.savez(tmp_path / "test.npz", x=large(data.test_x), y=data.test_y)
    watcher = Watcher()
    with mosquitto_broker(tmp_path) as broker, local_fleet(tmp_path, broker.url, parts) as fleet:
        evaluation = {"data": {"kind": "npz", "path": tmp_path / "test.npz"}, "every": ROUNDS}
        made = config(
            tmp_path, broker.url, "lenet5", strategy={"name": "fml"}, evaluation=evaluation
        )
        finished = run(made, watcher)
        fleet.check()
    assert finished.status == "finished", finished.error
    assert [len(event.merged) for event in watcher.events_of(control.RoundClosed)] == [
        len(names)
    ] * ROUNDS
    first = accuracies(watcher, 1)
    last = accuracies(watcher, ROUNDS)
    gain = finished.evaluation.accuracy - start_accuracy(made)
    print(f"global {finished.evaluation.accuracy:.3f}, gain {gain:.3f}, personal {first} to {last}")
    assert gain > 0.5
    assert min(last.values()) > 0.6
    assert np.mean(list(last.values())) > np.mean(list(first.values())) + 0.1


def test_boards_of_ten_and_of_a_hundred_classes_share_a_trunk(tmp_path):
    """Devices that tell ten digits and devices that tell two-digit numbers average the convolutions
    of CNN2 alone.
    """
    data = load_dataset("digits")
    export_fleet(tmp_path, "cnn2")
    sets = {
        (classes, name): pair(tmp_path, "cnn2", name, classes, ("head",) if classes == 100 else ())
        for classes, name in [(10, "lenet5"), (10, "cnn1"), (100, "lenet5"), (100, "cnn1")]
    }
    cuts = iid(len(data.train_y), 5, seed=3)
    parts = []
    for index, (classes, name) in enumerate([*sets, (10, "lenet5")]):
        x = data.train_x[cuts[index]]
        y = data.train_y[cuts[index]]
        shown = (
            (large(x), y)
            if classes == 10
            else numbers(x, y, 600, (2 * index - 4, 2 * index - 3), index)
        )
        parts.append((*shown, sets[classes, name]))
    watcher = Watcher()
    with mosquitto_broker(tmp_path) as broker, local_fleet(tmp_path, broker.url, parts) as fleet:
        made = config(
            tmp_path, broker.url, "cnn2", strategy={"name": "fml"}, private={"parts": ["head"]}
        )
        finished = run(made, watcher)
        fleet.check()
    assert finished.status == "finished", finished.error
    assert [len(event.merged) for event in watcher.events_of(control.RoundClosed)] == [5] * ROUNDS
    first = accuracies(watcher, 1)
    last = accuracies(watcher, ROUNDS)
    print(f"personal {first} to {last}")
    name = f"own-model-{finished.run}-{ROUNDS}.safetensors"
    heads = [
        tensors_in((tmp_path / "devices" / f"device-{i}" / name).read_bytes()) for i in range(5)
    ]
    assert [head["adaptor/head.weight"].shape for head in heads] == [
        (10, 64),
        (10, 64),
        (100, 64),
        (100, 64),
        (10, 64),
    ]
    for device, accuracy in last.items():
        # One of ten digits by chance is 0.1, one of the twenty numbers of a device 0.05.
        assert accuracy > (0.4 if device in {"device-2", "device-3"} else 0.6), (device, accuracy)
    assert np.mean(list(last.values())) > np.mean(list(first.values())) + 0.1
    # The part that stays is neither sent nor trained here; the sizes of updates are those of the
    # trunk.
    received = watcher.events_of(control.UpdateReceived)
    trunk_bytes = 4 * (16 * 9 + 16 + 2 * (16 * 16 * 9 + 16))
    assert all(trunk_bytes < event.size < trunk_bytes + 1500 for event in received)
    # The server has what the devices report, for `shoal rounds` and `shoal devices`.
    store = Store(made.store, read_only=True)
    try:
        assert queries.rounds(store)[-1].device_accuracy == pytest.approx(
            np.mean(list(last.values()))
        )
        assert {view.device.id: view.evaluation.accuracy for view in queries.devices(store)} == last
    finally:
        store.close()
