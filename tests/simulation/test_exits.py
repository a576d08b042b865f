"""Simulations of models with exits: as in a fleet, and with PyTorch's engine."""

import numpy as np
import pytest

from broker_server.store import Store
from fleet_protocol.errors import PlanError
from simulation.runner import simulate
from tests.simulation.simulations import as_a_fleet, settings, tensors
from tests.simulation.test_torch_backend import export
from trainer_export.losses.all_exits_teach import AllExitsTeach
from trainer_export.recipe import Recipe

DEPTHS = {
    "model": {
        "arch": "exit_resnet",
        "settings": {"channels": (4, 6), "blocks": (1, 1), "norm": "instance"},
        "widths": (1.0,),
        "depths": (1, 2),
        "recipe": {"loss": "all-exits-teach"},
    },
    "strategy": {"name": "depthfl", "depthfl": {"ramp_rounds": 2}},
    "round": {"rounds": 2, "fraction": 0.5},
    "train": {"epochs": 1},
    "tiers": {"assign": "capacity", "levels": None},
    "devices": {"count": 6, "types": [{"count": 3, "max_depth": 1}, {"count": 3}]},
}


@pytest.mark.slow
def test_every_round_has_the_accuracy_of_each_exit(tmp_path):
    """Beside that of the model's answer."""
    short = {**DEPTHS, "round": {"rounds": 1, "fraction": 0.5}, "data": {"train_limit": 120}}
    result = simulate(settings(tmp_path / "out", tmp_path / "cache", **short))
    store = Store(result.folder / "store", read_only=True)
    try:
        last = store.versions(result.run)[-1].evaluation
    finally:
        store.close()
    assert [metric.name for metric in last.metrics] == ["exit1", "exit2"]
    assert 0 < last.accuracy <= 1


def test_a_loss_without_exits_is_refused_before_the_export(tmp_path):
    model = {**DEPTHS["model"], "recipe": {}}
    config = settings(tmp_path / "out", tmp_path / "cache", **{**DEPTHS, "model": model})
    with pytest.raises(PlanError, match="has no parameter 'distillation'"):
        simulate(config)


def test_scalefl_is_refused_with_the_loss_of_depthfl(tmp_path):
    """Its numbers are there, but the exits would teach each other."""
    tables = {**DEPTHS, "strategy": {"name": "scalefl"}}
    with pytest.raises(PlanError, match="has the parameter 'inner', which the strategy does not"):
        simulate(settings(tmp_path / "out", tmp_path / "cache", **tables))


@pytest.mark.slow
def test_a_fleet_of_two_depths_has_the_bits_of_its_simulation(tmp_path):
    """Weights of every version, with distillation that grows from round to round."""
    config = settings(tmp_path / "out", tmp_path / "cache", **DEPTHS)
    simulated = simulate(config)
    finished = as_a_fleet(config, tmp_path)
    assert finished.status == "finished", finished.error
    ours = tensors(simulated.folder, simulated.run)
    theirs = tensors(tmp_path / "fleet", finished.run)
    assert len(ours) == len(theirs) == 3
    for one, other in zip(ours, theirs, strict=True):
        for name, value in one.items():
            np.testing.assert_array_equal(value, other[name], err_msg=name)


@pytest.mark.slow
def test_torch_trains_what_a_board_trains(tmp_path):
    """Two devices with numbers of the loss that the task sets, alone and together."""
    exits = export("exit_resnet", tmp_path, recipe=Recipe(loss=AllExitsTeach()))
    jobs = [exits.job(1, knobs={"distillation": 0.3, "inner": 0.5}), exits.job(2)]
    trainer = exits.trainer(together=True)
    for outcome, job in zip(trainer.train(jobs), jobs, strict=True):
        expected = exits.on_a_board(job)
        for name, value in expected.tensors.items():
            np.testing.assert_allclose(outcome.tensors[name], value, rtol=1e-4, atol=1e-5)
