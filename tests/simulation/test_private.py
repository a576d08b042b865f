"""Private parts in a simulation: what each device has of its own, and what it is worth."""

import numpy as np
import pytest

from broker_server.store import Store
from fleet_protocol.mapped_tensors import tensors_in
from simulation.data_tables import PartitionTable
from simulation.runner import simulate
from tests.simulation.simulations import as_a_fleet, settings, tensors

TWO_LABELS = {
    "round": {"rounds": 4, "fraction": 1.0},
    "tiers": {"assign": "dynamic", "levels": "a1-b1-c1"},
    "evaluation": {"local": True},
}


LABELS = PartitionTable(kind="shards", per_device=2)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def own_accuracies(result):
    """The mean accuracy of the devices on their own test samples, round by round."""
    store = Store(result.folder / "store", read_only=True)
    try:
        means = []
        for row in result.rows:
            tasks = [task for task in store.tasks(result.run, row.round) if task.metrics]
            means.append(np.mean([task.metrics.evaluation.accuracy for task in tasks]))
        return means
    finally:
        store.close()


@pytest.mark.parametrize(
    "private",
    [
        {"parts": ["head"]},
        {"parts": ["head"], "private_epochs": 2},
        {"parts": ["*norm*"]},
    ],
    ids=["fedper", "fedrep", "fedbn"],
)
@pytest.mark.slow
def test_private_parts_stay_with_their_devices(cache, tmp_path, private):
    """The global model keeps its initial values there, and each device has its own for each tier
    that it trained; the other parameters are merged.
    """
    model = {"settings": {"channels": (8, 16), "norm": "sbn"}}
    config = settings(tmp_path, cache, private=private, model=model, **TWO_LABELS)
    result = simulate(config.model_copy(update={"partition": LABELS}))
    first, *_, last = tensors(result.folder, result.run)
    files = sorted(tmp_path.glob("devices/*/private-*-4.safetensors"))
    kept = [tensors_in(path.read_bytes()) for path in files]
    assert len(kept) == 6
    names = {name.partition("/")[2] for name in kept[0]}
    for name, value in last.items():
        assert np.array_equal(value, first[name]) == (name in names)
    both = [values for values in kept if values.keys() == kept[0].keys()]
    assert len(both) > 1
    for name in kept[0]:
        assert not np.array_equal(both[0][name], both[1][name])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["heterofl", "fedrolex"])
def test_a_fleet_keeps_what_its_simulation_keeps(cache, tmp_path, strategy):
    """Real processes behind a broker end with the bits of the simulation, private parts included."""
    config = settings(
        tmp_path / "simulation",
        cache,
        strategy={"name": strategy},
        private={"parts": ["head"], "private_epochs": 1},
        devices={"count": 2, "types": [{"max_width": 1.0}, {"max_width": 0.5}]},
        round={"rounds": 2, "fraction": 1.0},
    )
    simulated = simulate(config)
    fleet = as_a_fleet(config, tmp_path)
    assert fleet.status == "finished", fleet.error
    for own, theirs in zip(
        tensors(simulated.folder, simulated.run),
        tensors(tmp_path / "fleet", fleet.run),
        strict=True,
    ):
        assert own.keys() == theirs.keys()
        for name, value in own.items():
            np.testing.assert_array_equal(value, theirs[name])
    mine = private_values(tmp_path / "simulation", 2)
    others = private_values(tmp_path / "devices", 2)
    assert len(mine) == len(others) == 2
    for one, another in zip(mine, others, strict=True):
        for name, value in one.items():
            np.testing.assert_array_equal(value, another[name])


def private_values(folder, number):
    """What devices keep after a round, in the order of their folders."""
    paths = sorted(folder.glob(f"**/private-*-{number}.safetensors"))
    return [tensors_in(path.read_bytes()) for path in paths]
