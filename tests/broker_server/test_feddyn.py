"""FedDyn on the server: its correction, what it asks of devices, and what it refuses."""

import numpy as np
import pytest

from broker_server.rounds.run_method import build_method
from broker_server.settings.fleet import FleetConfig
from broker_server.strategies.feddyn import ROUTINE, correction_of
from broker_server.strategies.optimizer_rules import OptimizerSettings
from broker_server.strategies.strategy import Contribution, GlobalModel
from device_runtime.training.routines import ROUTINES
from fleet_protocol.errors import ConfigError, PlanError
from fleet_protocol.messages import Instructions, TaskMetrics, TrainSettings
from models.plan import compile_plan, make_plan
from tests.broker_server.artifacts import tiny_layout, tiny_weights
from tests.broker_server.methods import built

LAYOUT = tiny_layout()
FEDDYN = {"alpha": 0.5, "fleet_devices": 4}
TRAIN = TrainSettings(learning_rate=0.1, epochs=1, batch_size=1, seed=0)


def update(device, value, examples=1):
    tier = LAYOUT.tier(1.0)
    plan = compile_plan(LAYOUT, make_plan(LAYOUT, tier))
    weights = {
        name: np.full(plan.tensors[name].local_shape, value, np.float32) for name in plan.required
    }
    metrics = TaskMetrics(
        examples=examples,
        batches=1,
        labels=(0,),
        fetch_seconds=0,
        train_seconds=0,
        resident_bytes=0,
    )
    return Contribution(device, tier, tier.id, plan, weights, metrics)


def after(strategy, updates, model):
    sums = strategy.merge.start()
    for one in updates:
        strategy.merge.fold(sums, one)
    return strategy.merge.finish(sums, model)


def test_the_correction_is_kept_from_round_to_round():
    """From weights of 1: changes of 1 and 3, then of one device -0.25; samples do not count."""
    strategy = built({"name": "feddyn", "feddyn": FEDDYN}, LAYOUT)
    ones = {name: np.ones_like(value) for name, value in tiny_weights(LAYOUT).items()}
    model = after(strategy, [update("a", 2.0), update("b", 4.0, examples=9)], GlobalModel(ones, {}))
    for name, value in model.weights.items():
        # The correction is -(2 / 4) * 2 = -1, and the mean 3.
        np.testing.assert_array_equal(correction_of(model.state, name), np.float32(-1.0))
        np.testing.assert_array_equal(value, np.float32(4.0))
    model = after(strategy, [update("a", 3.75)], model)
    for name, value in model.weights.items():
        np.testing.assert_array_equal(correction_of(model.state, name), np.float32(-0.9375))
        np.testing.assert_array_equal(value, np.float32(4.6875))
        assert value.dtype == correction_of(model.state, name).dtype == np.float32


def test_devices_train_with_the_routine_and_alpha():
    """The strength of the proximal term is alpha, so that graphs without one are refused."""
    asked = built({"name": "feddyn", "feddyn": FEDDYN}, LAYOUT).instruct(
        Instructions(train=TRAIN), 3
    )
    assert asked.routine == ROUTINE
    assert asked.train.proximal_mu == 0.5
    assert ROUTINE in ROUTINES


def test_depthfl_keeps_the_numbers_of_its_loss():
    """Knobs of the exits and the routine go out together."""
    table = {"name": "depthfl", "depthfl": {"feddyn": FEDDYN, "ramp_rounds": 0}}
    asked = built(table, LAYOUT).instruct(Instructions(train=TRAIN), 0)
    assert asked.routine == ROUTINE
    assert asked.train.knobs == {"distillation": 1.0, "inner": 1.0}


@pytest.mark.parametrize(
    ("table", "optimizer", "why"),
    [
        ({"feddyn": {}}, None, "set fleet_devices"),
        ({"feddyn": FEDDYN, "weighting": "samples"}, None, "remove strategy.weighting"),
        ({"feddyn": FEDDYN}, OptimizerSettings(name="fedadam"), r"remove \[server_optimizer\]"),
    ],
)
def test_what_the_mean_cannot_be_is_refused(table, optimizer, why):
    with pytest.raises(PlanError, match=why):
        built({"name": "feddyn", **table}, LAYOUT, optimizer=optimizer)


@pytest.mark.parametrize(
    "tables",
    [
        {"private": {"parts": ["head"]}},
        {"private": {"copy_model": True}},
        {"robust": {"merge": "median"}},
        {"round": {"buffer": 2}},
        {"privacy": {"noise_multiplier": 1.0, "clip": 1.0, "where": "central"}},
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(tables):
    """Before anything is exported."""
    given = {
        "fleet": "f",
        "model": {"artifacts": "sets", "arch": "tiny"},
        "strategy": {"name": "feddyn", "feddyn": FEDDYN},
        **tables,
    }

    def prepare():
        config = FleetConfig.model_validate(given)
        return build_method(config, LAYOUT, (LAYOUT.tier(1.0),))

    with pytest.raises((ConfigError, PlanError), match="feddyn"):
        prepare()
