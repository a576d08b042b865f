"""A device with little memory trains by a plan that recomputes, with the bits of the others."""

import numpy as np
import pytest

from broker_server.rounds.artifacts import load_artifacts
from broker_server.store import Store
from models.registry import Registry
from models.tier import Tier
from simulation.preparing import prepare
from simulation.runner import simulate
from tests.simulation.simulations import settings, tensors
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.recipe import Recipe

TABLES = {
    "model": {"arch": "conv", "settings": {"channels": (16, 32)}, "widths": (1.0,)},
    "tiers": {"assign": "capacity", "levels": None, "memory_share": 1.0},
    "round": {"rounds": 2, "fraction": 1.0},
    "devices": {"count": 3},
    "engine": {"workers": 1},
}


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A cache whose export has a plan with 0.85 of the memory, and the set of its tier."""
    cache = tmp_path_factory.mktemp("cache")
    prepared = prepare(settings(tmp_path_factory.mktemp("first"), cache, **TABLES))
    whole = load_artifacts(prepared.artifacts, "conv", chunk_bytes=1024).full
    bound = 0.85 * whole.manifest.peak_memory_bytes
    export_architecture(
        ExportRequest(
            Registry.zoo().get("conv"),
            dict(prepared.settings),
            [Tier(whole.tier.width, whole.tier.depth)],
            Recipe(),
            memory=(bound,),
        ),
        prepared.artifacts,
        ExportOptions(formats=("onnx",)),
    )
    found = load_artifacts(prepared.artifacts, "conv", chunk_bytes=1024).full
    assert found.manifest == whole.manifest
    assert found.manifest.peak_memory_bytes > bound >= found.memory_bytes
    return cache, found


def devices(free):
    """Three devices with some bytes of free memory."""
    return {"count": 3, "types": [{"type": "MacBookPro2018", "memory": free}]}


def test_a_run_by_a_plan_has_the_bits_of_one_without(planned, tmp_path):
    """The devices of the second run lack the memory for the step that keeps its activations."""
    cache, tier_set = planned
    (plan,) = tier_set.plans
    versions = []
    for name, free, artifact_set in (("whole", 0, tier_set), ("plan", tier_set.memory_bytes, plan)):
        config = settings(tmp_path / name, cache, **{**TABLES, "devices": devices(free)})
        result = simulate(config)
        store = Store(result.folder / "store", read_only=True)
        try:
            tasks = store.tasks(result.run, 1, "train")
        finally:
            store.close()
        assert {task.artifact_set.digest for task in tasks} == {artifact_set.ref.digest}
        versions.append(tensors(result.folder, result.run))
    first, second = versions
    assert len(first) == len(second) > 1
    for before, after in zip(first, second, strict=True):
        for tensor, value in before.items():
            assert np.array_equal(value, after[tensor]), tensor
    assert not np.array_equal(first[0]["head.weight"], first[-1]["head.weight"])


def test_a_device_with_less_memory_than_every_plan_is_left_out(planned, tmp_path):
    """The refusal names the tier and the memory of its smallest plan."""
    cache, tier_set = planned
    free = tier_set.memory_bytes - 1
    config = settings(tmp_path, cache, **{**TABLES, "devices": devices(free)})
    finished = simulate(config).finished
    assert finished.status == "failed"
    assert f"w1.00-d1 needs {tier_set.memory_bytes} bytes" in finished.error
