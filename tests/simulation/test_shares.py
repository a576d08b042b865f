"""Trained shares in a simulation: what stays as it was, and the same bits as in a fleet."""

import numpy as np
import pytest

from broker_server.rounds.artifacts import load_artifacts
from broker_server.store import Store
from device_runtime.training.kept_outputs import FOLDER as KEPT
from models import Tier
from models.tier import HEAD_SHARE
from simulation.model_tables import ModelTable
from simulation.preparing import prepare
from simulation.runner import simulate
from tests.marking import mostly_slow
from tests.simulation.simulations import as_a_fleet, settings, tensors

TIERS = ("w1.00-d1", "w1.00-d1-t0.50", "w1.00-d1-head")
MODEL = {
    "arch": "mlp",
    "settings": {"hidden": (16, 8)},
    "widths": (1.0,),
    "trained": (1.0, 0.5, "head"),
    "windows": True,
}
TABLES = {
    "model": MODEL,
    "tiers": {"assign": "capacity", "levels": None},
    "strategy": {"name": "heterofl"},
    "round": {"rounds": 2, "fraction": 1.0},
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def update_sizes(result):
    """Bytes of the updates of the last round, by device."""
    store = Store(result.folder / "store", read_only=True)
    try:
        return [task.update_size for task in store.tasks(result.run, 2)]
    finally:
        store.close()


@pytest.mark.parametrize(
    ("allowed", "backend"),
    mostly_slow(
        [(TIERS[1], "onnx"), (TIERS[2], "torch"), (TIERS[2], "onnx"), (TIERS[1], "torch")],
        lambda case: case == (TIERS[1], "torch"),
    ),
)
@pytest.mark.slow
def test_devices_train_their_share(cache, tmp_path, allowed, backend):
    """What no device trains keeps its bits, and the updates are as small as what they train."""
    tables = {**TABLES, "tiers": {**TABLES["tiers"], "allowed": (allowed,)}}
    config = settings(tmp_path, cache, engine={"backend": backend}, **tables)
    result = simulate(config)
    first, *_, last = tensors(result.folder, result.run)
    trained = {"head.weight", "head.bias"}
    if Tier.parse(allowed).trained != HEAD_SHARE:
        trained |= {name for name in first if name.startswith("hidden.1.")}
    for name, value in last.items():
        assert np.array_equal(value, first[name]) == (name not in trained), name
    values = sum(first[name].size for name in trained)
    assert max(update_sizes(result)) < 4 * values + 2000


def test_a_window_that_rolls_trains_every_block_in_turn(cache, tmp_path):
    """The top block in the first round, the one below in the second, and the head in both."""
    tables = {**TABLES, "strategy": {"name": "heterofl", "window": "rolling"}}
    tables["tiers"] = {**TABLES["tiers"], "allowed": TIERS[1:2]}
    result = simulate(settings(tmp_path, cache, **tables))
    first, second, third = tensors(result.folder, result.run)
    for before, after, block in ((first, second, "hidden.1."), (second, third, "hidden.0.")):
        for name, value in after.items():
            is_trained = name.startswith((block, "head."))
            assert np.array_equal(value, before[name]) != is_trained, name


def test_a_table_names_its_shares():
    """As the command does: numbers, or ``head``."""
    assert ModelTable(arch="conv", trained=(1, 0.5, "head")).shares == (1.0, 0.5, HEAD_SHARE)
    with pytest.raises(ValueError, match="trained"):
        ModelTable(arch="conv", trained=(0.0,))


@pytest.mark.slow
@pytest.mark.parametrize("allowed", TIERS[1:])
def test_a_fleet_of_shares_ends_where_its_simulation_does(cache, tmp_path, allowed):
    """Real processes behind a broker end with the bits of the simulation."""
    tables = {**TABLES, "tiers": {**TABLES["tiers"], "allowed": (allowed,)}}
    config = settings(tmp_path / "simulation", cache, devices={"count": 2}, **tables)
    simulated = simulate(config)
    fleet = as_a_fleet(config, tmp_path)
    assert fleet.status == "finished", fleet.error
    simulated_versions = tensors(simulated.folder, simulated.run)
    assert len(simulated_versions) == 3
    fleet_versions = tensors(tmp_path / "fleet", fleet.run)
    for own, theirs in zip(simulated_versions, fleet_versions, strict=True):
        for name, value in own.items():
            np.testing.assert_array_equal(value, theirs[name])


@pytest.mark.slow
def test_a_fleet_that_keeps_outputs_ends_where_its_simulation_does(cache, tmp_path):
    """Boards read the outputs of the frozen layers from disk; the simulation computes them all."""
    tables = {**TABLES, "tiers": {**TABLES["tiers"], "allowed": TIERS[2:]}}
    # So wide that a board measures that it reads rows faster than it computes them.
    tables["model"] = {**MODEL, "settings": {"hidden": (1024, 1024, 8)}}
    config = settings(tmp_path / "simulation", cache, devices={"count": 2}, **tables)
    simulated = simulate(config)
    fleet = as_a_fleet(config, tmp_path, cache=10_000_000)
    assert fleet.status == "finished", fleet.error
    folders = sorted((tmp_path / "devices").glob(f"*/{KEPT}"))
    assert len(folders) == 2
    for folder in folders:
        # The outputs of the layer below the head, eight numbers for each sample.
        assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) > 1000
    simulated_versions = tensors(simulated.folder, simulated.run)
    fleet_versions = tensors(tmp_path / "fleet", fleet.run)
    assert len(simulated_versions) == len(fleet_versions) == 3
    for own, theirs in zip(simulated_versions, fleet_versions, strict=True):
        for name, value in own.items():
            np.testing.assert_array_equal(value, theirs[name])


def test_a_device_with_little_memory_trains_a_share(cache, tmp_path):
    """The largest tier that fits the memory of its kind, as on a board."""
    config = settings(tmp_path / "free", cache, **TABLES)
    artifacts = load_artifacts(prepare(config).artifacts, "mlp", chunk_bytes=1024)
    needs = {tier: artifacts.tiers[tier].memory_bytes for tier in TIERS}
    assert needs[TIERS[0]] > needs[TIERS[1]] > needs[TIERS[2]]
    kinds = [{"count": 2, "memory": needs[tier]} for tier in TIERS[1:]]
    tables = {
        **TABLES,
        "devices": {"count": 6, "types": [{"count": 2}, *kinds]},
        "tiers": {**TABLES["tiers"], "memory_share": 1.0, "allowed": TIERS},
        "round": {"rounds": 1, "fraction": 1.0},
    }
    result = simulate(settings(tmp_path / "limited", cache, **tables))
    store = Store(result.folder / "store", read_only=True)
    try:
        taken = {task.device: task.tier for task in store.tasks(result.run, 1)}
    finally:
        store.close()
    assert [taken[device] for device in sorted(taken)] == [tier for tier in TIERS for _ in range(2)]
