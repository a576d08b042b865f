"""FedDyn end to end: a simulation beside plain PyTorch with the loss of the paper, and a fleet."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from broker_server.store import Store
from fleet_protocol.mapped_tensors import tensors_in
from simulation.data.held import SampleSplit
from simulation.preparing import prepare
from simulation.runner import simulate
from simulation.settings import SimulationConfig
from tests.simulation.simulations import as_a_fleet, tensors

ALPHA = 0.5
RATE = 0.1
STEPS = 2
DEVICES = 3
SIM = {
    "seed": 5,
    "model": {
        "arch": "mlp",
        "settings": {"hidden": (6,)},
        "recipe": {"momentum": 0.0, "weight_decay": 0.0, "clip_norm": 0.0, "proximal": True},
    },
    "data": {"name": "digits", "train_limit": 90, "test_limit": 30},
    "partition": {"kind": "shards", "per_device": 4},
    "devices": {"count": DEVICES},
    "round": {"rounds": 4, "fraction": 0.6},
    # One batch for all samples of a device, so that their order has no effect.
    "train": {"epochs": STEPS, "batch_size": 100, "learning_rate": RATE, "mask_labels": False},
    "strategy": {"name": "feddyn", "feddyn": {"alpha": ALPHA, "fleet_devices": DEVICES}},
    "robust": {"norm_bound": 0, "weight_bound": 0},
    "engine": {"workers": 1},
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def config(out, cache, **tables):
    return SimulationConfig.model_validate({**SIM, **tables, "out": out, "cache": cache})


def takers(result):
    """The places of the devices of each round."""
    places = []
    store = Store(result.folder / "store", read_only=True)
    try:
        for row in result.rounds:
            tasks = store.tasks(result.run, row.round)
            places.append([int(task.device.removeprefix("device-")) for task in tasks])
    finally:
        store.close()
    return places


def in_pytorch(start, samples, rounds):
    """Algorithm 1 with gradients g and h, whose devices take plain steps on the paper's loss."""
    model = {name: torch.tensor(value) for name, value in start.items()}
    h = {name: torch.zeros_like(value) for name, value in model.items()}
    g = [dict(h) for _ in range(DEVICES)]
    for devices in rounds:
        trained = []
        for device in devices:
            own = trained_by(model, g[device], *samples[device])
            for name, value in own.items():
                g[device][name] = g[device][name] - ALPHA * (value - model[name])
            trained.append(own)
        for name, before in model.items():
            changes = torch.stack([own[name] - before for own in trained])
            h[name] = h[name] - ALPHA / DEVICES * changes.sum(0)
            model[name] = before + changes.mean(0) - h[name] / ALPHA
    return model


def trained_by(model, slope, x, y):
    own = {name: value.clone().requires_grad_() for name, value in model.items()}
    for _ in range(STEPS):
        hidden = (x @ own["hidden.0.weight"].T + own["hidden.0.bias"]).relu()
        logits = hidden @ own["head.weight"].T + own["head.bias"]
        loss = functional.cross_entropy(logits, y)
        for name, value in own.items():
            loss = loss - (slope[name] * value).sum()
            loss = loss + ALPHA / 2 * ((value - model[name]) ** 2).sum()
        gradients = torch.autograd.grad(loss, list(own.values()))
        own = {
            name: (value - RATE * gradient).detach().requires_grad_()
            for (name, value), gradient in zip(own.items(), gradients, strict=True)
        }
    return {name: value.detach() for name, value in own.items()}


def test_a_simulation_ends_where_the_loss_of_the_paper_does(cache, tmp_path):
    """Two of three devices a round, so that memories and correction are of unequal age."""
    settings = config(tmp_path, cache)
    result = simulate(settings)
    assert result.finished.status == "finished", result.finished.error
    prepared = prepare(settings)
    x = torch.from_numpy(np.load(prepared.data / "train_x.npy")).flatten(1)
    y = torch.from_numpy(np.load(prepared.data / "train_y.npy"))
    split = SampleSplit.load(prepared.split)
    samples = [(x[held], y[held]) for held in split.train]
    rounds = takers(result)
    assert all(len(devices) == 2 for devices in rounds)
    assert len({tuple(devices) for devices in rounds}) > 1
    first, *_, last = tensors(result.folder, result.run)
    expected = in_pytorch(first, samples, rounds)
    for name, value in expected.items():
        np.testing.assert_allclose(last[name], value.numpy(), atol=2e-5)
        assert not np.allclose(last[name], first[name], atol=1e-3)


@pytest.mark.slow
def test_a_fleet_ends_where_its_simulation_does(cache, tmp_path):
    """With the same bits, in the global model and in what boards remember; DepthFL over exits."""
    tables = {
        "model": {
            "arch": "exit_resnet",
            "settings": {"channels": (4, 6), "blocks": (1, 1), "norm": "instance"},
            "depths": (1, 2),
            "recipe": {"loss": "all-exits-teach", "proximal": True},
        },
        "partition": {"kind": "iid"},
        "devices": {"count": 2, "types": [{"max_depth": 1}, {"max_depth": 2}]},
        "round": {"rounds": 3, "fraction": 1.0},
        "train": {"epochs": 1, "batch_size": 16, "learning_rate": 0.05},
        "strategy": {
            "name": "depthfl",
            "depthfl": {"ramp_rounds": 0, "feddyn": {"alpha": 0.1, "fleet_devices": 2}},
        },
    }
    settings = config(tmp_path / "simulation", cache, **tables)
    simulated = simulate(settings)
    fleet = as_a_fleet(settings, tmp_path)
    assert fleet.status == "finished", fleet.error
    mine = tensors(simulated.folder, simulated.run)
    theirs = tensors(tmp_path / "fleet", fleet.run)
    assert len(mine) == len(theirs) == 4
    for own, other in zip(mine, theirs, strict=True):
        same(own, other)
    remembered = memories(tmp_path / "simulation")
    assert len(remembered) == 2
    for own, other in zip(remembered, memories(tmp_path / "devices"), strict=True):
        same(own, other)


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name])


def memories(folder):
    """What devices remember after the last round, in the order of their folders."""
    paths = sorted(folder.glob("**/dynamic-*-3.safetensors"))
    return [tensors_in(path.read_bytes()) for path in paths]
