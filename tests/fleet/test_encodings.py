"""Runs whose updates are encoded: a fleet ends where its simulation does, in fewer bytes and near
whole updates.
"""

import pytest

from broker_server.store import Store
from simulation.runner import simulate
from tests.simulation.simulations import as_a_fleet, settings, tensors

TINY = {
    "model": {"arch": "mlp", "settings": {"hidden": (32,)}, "widths": (1.0, 0.5)},
    "devices": {"count": 2},
    "round": {"rounds": 4, "fraction": 1.0},
    "tiers": {"assign": "fix", "levels": "a1-b1"},
    "engine": {"workers": 1},
}


def update_bytes(folder, run):
    store = Store(folder / "store", read_only=True)
    try:
        return [
            task.update_size for number in range(1, 5) for task in store.tasks(run, number, "train")
        ]
    finally:
        store.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoding", "strategy", "share", "download"),
    [
        ("fp16", "heterofl", 0.55, "int8"),
        ("int8", "heterofl", 0.3, "fp32"),
        ("int4", "heterofl", 0.19, "fp32"),
        ("int4", "fedrolex", 0.19, "fp16"),
        ("bf16", "heterofl", 0.45, "bf16"),
        ("topk", "heterofl", 0.11, "fp32"),
    ],
)
def test_a_fleet_ends_where_its_simulation_does(
    tmp_path, encoding, strategy, share, download, cache
):
    """To the bit, with residuals that boards keep and with rounding at random; headers count in a
    model this small.
    """
    tables = TINY | {"strategy": {"name": strategy}}
    tables |= {"upload": {"encoding": encoding}, "download": {"encoding": download}}
    encoded = settings(tmp_path / "sim", cache, **tables)
    simulated = simulate(encoded)
    finished = as_a_fleet(encoded, tmp_path)
    assert finished.status == "finished", finished.error
    ours, theirs = (
        tensors(tmp_path / name, run)[-1]
        for name, run in (("sim", simulated.run), ("fleet", finished.run))
    )
    assert all((ours[name] == theirs[name]).all() for name in ours)
    whole = simulate(settings(tmp_path / "whole", cache, **tables | {"upload": {}, "download": {}}))
    sizes = [
        update_bytes(tmp_path / name, run)
        for name, run in (("sim", simulated.run), ("fleet", finished.run))
    ]
    assert sizes[0] == sizes[1]
    assert sum(sizes[0]) < share * sum(update_bytes(tmp_path / "whole", whole.run))
    evaluations = [run.finished.evaluation for run in (simulated, whole)]
    assert evaluations[0].loss == pytest.approx(
        evaluations[1].loss, abs=0.6 if download == "int8" else 0.3
    )
    assert finished.evaluation.loss == pytest.approx(evaluations[0].loss, rel=1e-5)
    kept = list((tmp_path / "devices").glob("*/residual-*"))
    assert bool(kept) == (encoding not in {"fp16", "bf16"} and strategy == "heterofl")


@pytest.mark.slow
def test_boards_that_add_noise_themselves(tmp_path, cache):
    """They tell no labels, are taken all the same, and the run ends near its simulation, whose
    noise is another.
    """
    tables = TINY | {
        "privacy": {"where": "local", "clip": 1.0, "noise_multiplier": 0.001, "delta": 1e-5}
    }
    hidden = settings(tmp_path / "sim", cache, **tables)
    simulated = simulate(hidden)
    finished = as_a_fleet(hidden, tmp_path)
    assert (finished.status, finished.rounds) == ("finished", 4), finished.error
    assert finished.evaluation.loss == pytest.approx(simulated.finished.evaluation.loss, rel=0.02)


@pytest.mark.slow
def test_the_torch_backend_encodes_as_well(tmp_path, cache):
    """Its updates have as many bytes, and it keeps what they lose."""
    tables = TINY | {"upload": {"encoding": "int8"}}
    runs = {}
    for backend in ("onnx", "torch"):
        config = settings(
            tmp_path / backend, cache, **tables | {"engine": {"workers": 1, "backend": backend}}
        )
        runs[backend] = simulate(config)
        assert list((tmp_path / backend / "devices").glob("*/residual-*"))
    assert update_bytes(tmp_path / "onnx", runs["onnx"].run) == update_bytes(
        tmp_path / "torch", runs["torch"].run
    )
    losses = [run.finished.evaluation.loss for run in runs.values()]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
