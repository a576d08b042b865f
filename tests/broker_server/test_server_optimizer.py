"""Server optimizers: signs, moments, restarts, exactness, and what may be overwritten."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from broker_server.strategies import server_optimizer
from broker_server.strategies.optimizer_rules import OptimizerSettings
from broker_server.strategies.server_optimizer import (
    apply,
    init,
    server_step,
    state_from_tensors,
    state_tensors,
)
from fleet_protocol.errors import PlanError

NAMES = ("plain", "fedavgm", "fedadam", "fedyogi", "fedadagrad")
ADAPTIVE = ("fedadam", "fedyogi", "fedadagrad")
NUMBERS = st.floats(-10, 10, width=32)


def reference(
    name: str, updates: list[float], *, eta: float, b1: float, b2: float, tau: float
) -> list[float]:
    """One number, step by step, from the paper's table."""
    weight = 0.0
    m = 0.0
    v = 0.0
    seen = []
    for g in updates:
        if name == "plain":
            weight += eta * g
        elif name == "fedavgm":
            m = b1 * m + g
            weight += eta * m
        else:
            m = b1 * m + (1 - b1) * g
            if name == "fedadam":
                v = b2 * v + (1 - b2) * g * g
            elif name == "fedyogi":
                v = v - (1 - b2) * g * g * float(np.sign(v - g * g))
            else:
                v = v + g * g
            weight += eta * m / (math.sqrt(v) + tau)
        seen.append(weight)
    return seen


def arrays(values, dtype=np.float64):
    return {"w": np.array([values], dtype)}


@given(st.sampled_from(NAMES), st.lists(NUMBERS, min_size=1, max_size=8))
def test_every_optimizer_follows_its_formula(name, updates):
    """PLUS sign, no bias correction, tau outside the root."""
    chosen = OptimizerSettings(name=name, learning_rate=0.1, beta1=0.8, beta2=0.9, tau=0.01)
    weights = arrays(0.0)
    state = init(chosen, weights)
    for update, expected in zip(
        updates, reference(name, updates, eta=0.1, b1=0.8, b2=0.9, tau=0.01), strict=True
    ):
        weights, state = apply(chosen, state, weights, arrays(update))
        assert weights["w"][0] == pytest.approx(expected, abs=1e-9)
    assert state.steps == len(updates)


@given(st.sampled_from(NAMES), st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=40)
def test_pieces_donation_and_merged_weights_do_not_change_the_result(name, seed, donate):
    """A tensor longer than a piece, a scalar and a matrix: every entry is stepped as if it were
    alone.
    """
    rng = np.random.default_rng(seed)
    shapes = {"long": (70_001,), "scalar": (), "matrix": (3, 4), "empty": (0, 2)}
    chosen = OptimizerSettings(name=name, learning_rate=0.3)
    weights = {key: rng.standard_normal(shape) for key, shape in shapes.items()}
    state = init(chosen, weights)
    for _ in range(3):
        update = {key: rng.standard_normal(shape) for key, shape in shapes.items()}
        merged = {key: weights[key] + update[key] for key in shapes}
        before = {key: np.array(value) for key, value in weights.items()}
        plain, plain_state = apply(chosen, state, weights, update)
        new, state = apply(chosen, state, weights, merged, merged=True, donate=donate)
        for key, shape in shapes.items():
            assert new[key].shape == shape
            np.testing.assert_allclose(new[key], plain[key], rtol=1e-9, atol=1e-9)
            np.testing.assert_array_equal(weights[key], before[key])
            for mine, other in (
                (state.first, plain_state.first),
                (state.second, plain_state.second),
            ):
                if mine:
                    np.testing.assert_allclose(mine[key], other[key], rtol=1e-9, atol=1e-9)
        weights = new


def test_without_donation_nothing_given_is_written():
    """Weights, moments and update keep their bits; read-only arrays are welcome even to
    `donate`.
    """
    rng = np.random.default_rng(0)
    chosen = OptimizerSettings(name="fedyogi")
    weights = {"w": rng.standard_normal(50)}
    update = {"w": rng.standard_normal(50)}
    _, state = apply(chosen, init(chosen, weights), weights, update)
    kept = [
        np.array(value)
        for value in (weights["w"], update["w"], state.first["w"], state.second["w"])
    ]
    new, _ = apply(chosen, state, weights, update)
    given_now = (weights["w"], update["w"], state.first["w"], state.second["w"])
    for before, after in zip(kept, given_now, strict=True):
        np.testing.assert_array_equal(before, after)
        after.flags.writeable = False
    frozen, _ = apply(chosen, state, weights, update, donate=True)
    np.testing.assert_array_equal(frozen["w"], new["w"])


def test_plain_with_rate_one_returns_the_merged_weights_bit_for_bit():
    """The average of the strategies is not blurred by going through a difference."""
    rng = np.random.default_rng(1)
    weights = {"w": rng.standard_normal(1000).astype(np.float32)}
    merged = {"w": (rng.standard_normal(1000) * 1e-4).astype(np.float32)}
    chosen = OptimizerSettings()
    new, state = apply(chosen, init(chosen, weights), weights, merged, merged=True)
    np.testing.assert_array_equal(new["w"], merged["w"])
    assert new["w"].dtype == np.float32
    assert state.steps == 1


@pytest.mark.parametrize("name", ADAPTIVE)
def test_the_first_adaptive_step_does_not_depend_on_the_size_of_the_update(name):
    """With tau far below it, an update of 1 and one of 1000 move a weight alike; float32 stays
    float32.
    """
    chosen = OptimizerSettings(name=name, tau=1e-9)
    moved = []
    for size in (1.0, 1000.0):
        weights = arrays(0.0, np.float32)
        new, state = apply(chosen, init(chosen, weights), weights, arrays(size, np.float32))
        assert new["w"].dtype == state.second["w"].dtype == np.float32
        moved.append(float(new["w"][0]))
    assert moved[0] == pytest.approx(moved[1], rel=1e-5)
    assert moved[0] > 0


def test_untouched_entries_go_on_moving_while_the_moment_decays():
    """Where no device held an entry g is 0, yet m is not (specification 2.5)."""
    chosen = OptimizerSettings(name="fedadam")
    weights = arrays(0.0)
    weights, state = apply(chosen, init(chosen, weights), weights, arrays(1.0))
    later, _ = apply(chosen, state, weights, dict(weights), merged=True)
    assert later["w"][0] > weights["w"][0]


def test_milestones_restart_the_moments_and_lower_the_rate():
    """From step 3 on it is as if the run began there, with half the rate (specification 2.5)."""
    restarting = OptimizerSettings(
        name="fedadam", learning_rate=0.2, milestones=(3,), restart_factor=0.5
    )
    fresh = OptimizerSettings(name="fedadam", learning_rate=0.1)
    weights = arrays(0.0)
    state = init(restarting, weights)
    for update in (1.0, -3.0):
        weights, state = apply(restarting, state, weights, arrays(update))
    other = weights
    other_state = init(fresh, weights)
    for update in (0.5, 2.0):
        weights, state = apply(restarting, state, weights, arrays(update))
        other, other_state = apply(fresh, other_state, other, arrays(update))
        np.testing.assert_array_equal(weights["w"], other["w"])
    assert state.steps == 4


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_server_goes_on_from_the_stored_arrays(name):
    """The state is a flat mapping of arrays; stored and read back between steps, it changes
    nothing.
    """
    chosen = OptimizerSettings(name=name, learning_rate=0.5, milestones=(2,))
    step = server_step(chosen)
    rng = np.random.default_rng(2)
    weights = {"a.b": rng.standard_normal(5)}
    stored = {}
    straight = dict(weights)
    state = init(chosen, weights)
    for _ in range(3):
        change = rng.standard_normal(5)
        straight, state = apply(
            chosen, state, straight, {"a.b": straight["a.b"] + change}, merged=True
        )
        weights, stored = step(weights, {"a.b": weights["a.b"] + change}, stored)
        stored = {key: np.array(value) for key, value in stored.items()}
        np.testing.assert_array_equal(weights["a.b"], straight["a.b"])
    back = state_from_tensors({**stored, "another.state": np.zeros(1)})
    assert back.steps == 3
    assert set(state_tensors(back)) == set(stored)


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "adam"},
        {"beta1": 1.0},
        {"beta2": -0.1},
        {"tau": 0.0},
        {"learning_rate": -1.0},
        {"learning_rate": float("nan")},
        {"second_start": -1.0},
        {"milestones": (3, 2)},
        {"milestones": (0,)},
        {"restart_factor": 0.0},
    ],
)
def test_numbers_out_of_range_are_refused_at_once(wrong):
    """Before any training starts."""
    with pytest.raises(ValidationError):
        OptimizerSettings(**wrong)


def test_a_tensor_that_does_not_fit_is_named():
    """A missing tensor, another shape, a state of other weights."""
    chosen = OptimizerSettings(name="fedadam")
    weights = {"w": np.zeros(2)}
    state = init(chosen, weights)
    with pytest.raises(PlanError, match=r"tensor w of the update .* missing"):
        apply(chosen, state, weights, {})
    with pytest.raises(PlanError, match=r"tensor w of the update .* \(3,\)"):
        apply(chosen, state, weights, {"w": np.zeros(3)})
    with pytest.raises(PlanError, match="state"):
        apply(chosen, init(chosen, {"v": np.zeros(2)}), weights, {"w": np.ones(2)})
    with pytest.raises(PlanError, match="steps"):
        state_from_tensors({"other": np.zeros(1)})


def test_second_start_is_where_v_begins():
    """The paper asks for tau squared; then the first step is smaller."""
    weights = arrays(0.0)
    steps = []
    for start in (0.0, 1.0):
        chosen = OptimizerSettings(name="fedyogi", second_start=start)
        new, _ = apply(chosen, init(chosen, weights), weights, arrays(1.0))
        steps.append(float(new["w"][0]))
    assert steps[1] < steps[0]
    assert server_optimizer.OptimizerSettings(name="plain").eta == 1.0
