"""Recipes by name: optimizers, losses and what is kept, the same in a fleet, in a simulation and on
both backends.
"""

import json
from contextlib import closing

import numpy as np
import pytest

from broker_server.store import Store, queries
from fleet_protocol.errors import ConfigError, DataError, PlanError
from shoal.cli.views.rounds import ROUNDS
from simulation.runner import simulate
from tests.simulation.simulations import as_a_fleet, settings, tensors

MLP = {
    "arch": "mlp",
    "settings": {"hidden": (16,)},
    "widths": (1.0, 0.5),
    "recipe": {"optimizer": "adamw"},
}
TINY = {
    "model": MLP,
    "devices": {"count": 2},
    "round": {"rounds": 3, "fraction": 1.0},
    "tiers": {"assign": "fix", "levels": "a1-b1"},
    "train": {"learning_rate": 0.01, "epochs": 1},
    "engine": {"workers": 1},
}


OWN = """
import torch
from shoal import loss, metric

@loss("int64")
def focal(outputs, targets, *, gamma=2.0):
    right = torch.log_softmax(outputs, 1).gather(1, targets[:, None])[:, 0]
    return -((1 - right.exp()) ** gamma) * right

@metric()
def top_two(outputs, targets):
    return (outputs.topk(2).indices == targets[:, None]).any(1)
"""


def own_file(folder):
    """A user's file without an architecture."""
    path = folder / "my_models.py"
    path.write_text(OWN)
    return path


def final(folder, run):
    return tensors(folder, run)[-1]


def done(config):
    """Simulates to the end; gives the run."""
    result = simulate(config)
    assert result.finished.status == "finished", result.finished.error
    return result.run


def apart(one, other):
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


@pytest.mark.slow
def test_a_fleet_keeps_the_states_of_adamw_as_a_simulation_does(cache, tmp_path):
    """Agents over a broker and virtual devices end alike, and otherwise than where every round
    begins anew.
    """
    ramp = {"kind": "cosine", "warmup": 0.5, "per": "step"}
    kept = settings(
        tmp_path / "sim",
        cache,
        **TINY | {"train": TINY["train"] | {"optimizer_state": "keep", "rate": ramp}},
    )
    simulated = simulate(kept)
    finished = as_a_fleet(kept, tmp_path)
    assert finished.status == "finished"
    ours = final(tmp_path / "sim", simulated.run)
    assert apart(ours, final(tmp_path / "fleet", finished.run)) <= 1e-6
    assert list((tmp_path / "devices").glob("*/optimizer-*.safetensors"))
    anew = settings(tmp_path / "anew", cache, **TINY)
    assert apart(ours, final(tmp_path / "anew", simulate(anew).run)) > 1e-3


@pytest.mark.parametrize(
    "recipe",
    [
        {"optimizer": {"name": "adamw", "beta1": 0.8}, "clip_norm": 0.5},
        {"optimizer": {"name": "sgd", "momentum": 0.8, "nesterov": True}},
        {"loss": {"name": "focal", "gamma": 1.0}},
    ],
    ids=["adamw", "nesterov", "own loss"],
)
@pytest.mark.slow
def test_both_backends_do_the_same_arithmetic(cache, tmp_path, recipe):
    """Graphs on onnxruntime and the torch backend, alone and in groups."""
    model = MLP | {"recipe": recipe, "models": own_file(tmp_path)}
    tables = TINY | {"model": model, "round": {"rounds": 1, "fraction": 1.0}}
    found = []
    for number, engine in enumerate(({}, {"backend": "torch"}, {"backend": "torch", "group": 2})):
        config = settings(
            tmp_path / str(number), cache, **tables | {"engine": {"workers": 1, **engine}}
        )
        found.append(final(config.out, done(config)))
    assert apart(found[0], found[1]) <= 1e-5
    assert apart(found[0], found[2]) <= 1e-5


@pytest.mark.parametrize(
    ("recipe", "match"),
    [
        ({"optimizer": "adamvv"}, "unknown optimizer 'adamvv' .did you mean"),
        (
            {"optimizer": {"name": "adam", "beta3": 0.5}},
            "has no parameter 'beta3' .did you mean 'beta",
        ),
        ({"optimizer": "adam", "momentum": 0.5}, "the optimizer adam has no parameter 'momentum'"),
        (
            {"optimizer": {"name": "sgd", "momentum": 0, "nesterov": True}},
            "nesterov needs a momentum",
        ),
        ({"loss": "hubber"}, "unknown loss 'hubber'"),
    ],
)
def test_what_is_not_known_is_refused(cache, tmp_path, recipe, match):
    """By name, with what is closest."""
    with pytest.raises(ConfigError, match=match):
        simulate(settings(tmp_path, cache, **TINY | {"model": MLP | {"recipe": recipe}}))


def test_states_do_not_follow_a_moving_window(cache, tmp_path):
    """A rolling plan has other units every round."""
    tables = TINY | {"train": {"optimizer_state": "keep"}, "strategy": {"name": "fedrolex"}}
    with pytest.raises(PlanError, match="requires that a tier keeps the same units"):
        simulate(settings(tmp_path, cache, **tables))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "metric"),
    [
        ({"loss": "huber", "metrics": ["mae", "rmse"], "optimizer": "adam"}, "mae"),
        (
            {
                "loss": {"name": "cross-entropy", "label_smoothing": 0.1},
                "metrics": ["f1", "matthews"],
            },
            "f1",
        ),
        ({"loss": {"name": "focal", "gamma": 1.0}, "metrics": ["top_two"]}, "top_two"),
    ],
    ids=["numbers", "labels", "own"],
)
def test_a_fleet_judges_by_metrics_as_a_simulation_does(cache, tmp_path, capsys, recipe, metric):
    """Boards and server, on held-out samples and on the test set; the store tells it as a table and
    as JSON.
    """
    model = MLP | {"recipe": recipe, "models": own_file(tmp_path)}
    if "huber" in str(recipe):
        model |= {"settings": {"hidden": (16,), "classes": 1}}
    config = settings(
        tmp_path / "sim", cache, **TINY | {"model": model, "evaluation": {"holdout": 0.2}}
    )
    simulated = simulate(config)
    finished = as_a_fleet(config, tmp_path, holdout=0.2)
    assert finished.status == "finished", finished.error
    assert (
        apart(final(tmp_path / "sim", simulated.run), final(tmp_path / "fleet", finished.run))
        <= 1e-6
    )
    for folder in ("sim", "fleet"):
        ROUNDS.show(tmp_path / folder / "store", None, as_json=False)
        assert f"{metric} on devices" in " ".join(capsys.readouterr().out.split())
        ROUNDS.show(tmp_path / folder / "store", None, as_json=True)
        rounds = json.loads(capsys.readouterr().out)
        values = [rounds[-1][f"round.evaluation.metrics.{metric}.value"]]
        assert values == [item.value for item in finished.evaluation.metrics if item.name == metric]
        shared = rounds[-1][f"device_metrics.{metric}"]
        with closing(Store(tmp_path / folder / "store", read_only=True)) as store:
            tasks = queries.rounds(store)[-1].tasks
        own = [task.metrics.evaluation.metrics[0].value for task in tasks]
        assert min(own) <= shared <= max(own) or metric == "f1"
    if metric == "mae":  # digits as numbers: better than always saying 4.5
        assert values[0] < 2.0
        assert finished.evaluation.accuracy is None


@pytest.mark.parametrize(
    "loss",
    [
        {"name": "cross-entropy", "label_smoothing": 0.1, "class_weights": [1, 2] * 5},
        "binary-cross-entropy",
        "mean-absolute-error",
    ],
    ids=str,
)
@pytest.mark.slow
def test_both_backends_have_the_same_losses(cache, tmp_path, loss):
    """The torch backend, alone and in groups, ends where the graphs do."""
    one = {"settings": {"hidden": (16,), "classes": 1}} if isinstance(loss, str) else {}
    tables = TINY | {
        "model": MLP | one | {"recipe": {"loss": loss}},
        "round": {"rounds": 1, "fraction": 1.0},
    }
    if loss == "binary-cross-entropy":
        with pytest.raises(DataError, match="lie in 0 to 9; binary-cross-entropy takes 0 to 1"):
            simulate(settings(tmp_path, cache, **tables))
        return
    found = []
    for number, engine in enumerate(({}, {"backend": "torch"}, {"backend": "torch", "group": 2})):
        config = settings(
            tmp_path / str(number), cache, **tables | {"engine": {"workers": 1, **engine}}
        )
        found.append(final(config.out, done(config)))
    assert apart(found[0], found[1]) <= 1e-5
    assert apart(found[0], found[2]) <= 1e-5
