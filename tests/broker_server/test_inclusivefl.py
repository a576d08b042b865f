"""InclusiveFL on a real text encoder: what is shared, distilled, isolated, and what an absent group
keeps.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker_server.strategies import inclusivefl
from broker_server.strategies.inclusive_state import state_from_tensors, state_tensors
from broker_server.strategies.inclusivefl import BASELINES, InclusiveSettings
from broker_server.strategies.ladder import Ladder, stack_of
from broker_server.strategies.optimizer_rules import OptimizerSettings
from fleet_protocol.errors import PlanError
from models import Registry, infer_layout
from tests.models.layouts import noise

DEPTHS = {"weak": 1, "medium": 2, "strong": 4}
PLAIN = OptimizerSettings(name="plain")


@pytest.fixture(scope="module")
def layout():
    return infer_layout(
        Registry.zoo().get("text_encoder"),
        {
            "embed": 8,
            "heads": 2,
            "ffn": 6,
            "blocks": 4,
            "vocab": 11,
            "input_shape": (5,),
            "classes": 3,
        },
    )


def updates_of(state, seed=0):
    rng = np.random.default_rng(seed)
    return {
        group: {
            name: rng.standard_normal(value.shape).astype(np.float32)
            for name, value in model.items()
        }
        for group, model in state.models.items()
    }


def same(one, other):
    return all(np.array_equal(one[name], other[name]) for name in one)


def test_groups_start_from_the_bottom_of_one_model(layout):
    """Each has the embeddings, its layers, and a head; a group may bring a head of its own
    shape.
    """
    weights = noise(layout)
    own = {
        "weak": {"head.weight": np.ones((7, 8), np.float32), "head.bias": np.ones(7, np.float32)}
    }
    state = inclusivefl.init(layout, DEPTHS, weights, InclusiveSettings(), own)
    assert set(state.models["strong"]) == set(weights)
    assert same(state.models["medium"], weights)
    assert not any(name.startswith("blocks.2") for name in state.models["medium"])
    assert state.models["weak"]["head.weight"].shape == (7, 8)
    assert not np.shares_memory(state.models["weak"]["tokens.weight"], weights["tokens.weight"])
    new, _ = inclusivefl.apply(
        state, updates_of(state), dict.fromkeys(DEPTHS, 1), InclusiveSettings()
    )
    assert new.models["weak"]["head.weight"].shape == (7, 8)


def test_all_deep_is_plain_federated_averaging(layout):
    """One group, the plain optimizer: weights plus the mean update."""
    weights = noise(layout)
    chosen = BASELINES["all_large"].settings(InclusiveSettings(0.5, PLAIN))
    assert chosen.beta == 0
    state = inclusivefl.init(layout, {"all": 4}, weights, chosen)
    updates = updates_of(state)
    new, _ = inclusivefl.apply(state, updates, {"all": 9}, chosen)
    for name, value in weights.items():
        np.testing.assert_array_equal(new.models["all"][name], value + updates["all"][name])


def test_shared_layers_agree_and_isolated_ones_do_not(layout):
    """After a round every owner of a layer has the same values; tops and heads are the group's
    own.
    """
    chosen = InclusiveSettings(0.5, PLAIN)
    state = inclusivefl.init(layout, DEPTHS, noise(layout), chosen)
    new, _ = inclusivefl.apply(
        state, updates_of(state), {"weak": 3, "medium": 1, "strong": 2}, chosen
    )
    weak, medium, strong = (new.models[group] for group in DEPTHS)
    for name in state.stack.stem:
        np.testing.assert_array_equal(weak[name], medium[name])
        np.testing.assert_array_equal(weak[name], strong[name])
    for name in state.stack.layer(1):
        np.testing.assert_array_equal(medium[name], strong[name])
        assert not np.array_equal(weak[name], strong[name])
    for name in (*state.stack.layer(2), *state.stack.head):
        assert not np.array_equal(medium[name], strong[name])


def test_the_top_layer_receives_what_the_deeper_group_left_in_the_round_before(layout):
    """The top becomes beta m + (1 - beta) g, tensor by tensor; in the first round m is 0, so the
    update shrinks.
    """
    chosen = InclusiveSettings(0.25, PLAIN)
    state = inclusivefl.init(layout, DEPTHS, noise(layout), chosen)
    first = updates_of(state)
    counts = dict.fromkeys(DEPTHS, 1)
    middle, seen = inclusivefl.apply(state, first, counts, chosen)
    top = state.stack.layer(2)
    for name in state.models["medium"]:
        factor = 0.75 if name in top else 1.0
        np.testing.assert_allclose(
            seen.distilled["medium"][name], factor * first["medium"][name], rtol=1e-6
        )
    second = updates_of(state, 1)
    _, seen = inclusivefl.apply(middle, second, counts, chosen)
    layers = [state.stack.layer(number) for number in (2, 3, 4)]
    for position, name in enumerate(top):
        taught = np.mean([first["strong"][layer[position]] for layer in layers], axis=0)
        expected = 0.25 * taught + 0.75 * second["medium"][name]
        np.testing.assert_allclose(seen.distilled["medium"][name], expected, rtol=1e-5, atol=1e-6)
    assert same(seen.distilled["strong"], second["strong"])


@given(st.sampled_from(list(DEPTHS)), st.integers(0, 100))
@settings(max_examples=15, deadline=None)
def test_an_absent_group_keeps_what_is_its_own(layout, absent, seed):
    """Its momentum, optimizer, top layer and head keep their bits; its shared layers follow the
    others.
    """
    chosen = InclusiveSettings()
    state = inclusivefl.init(layout, DEPTHS, noise(layout), chosen)
    state, _ = inclusivefl.apply(state, updates_of(state, seed), dict.fromkeys(DEPTHS, 1), chosen)
    counts = dict.fromkeys(DEPTHS, 2) | {absent: 0}
    new, seen = inclusivefl.apply(state, updates_of(state, seed + 1), counts, chosen)
    assert absent not in seen.stepped
    assert new.optimizers[absent] is state.optimizers[absent]
    assert new.momenta.get(absent) is state.momenta.get(absent)
    own = (*state.stack.layer(DEPTHS[absent]), *state.stack.head)
    assert same({name: new.models[absent][name] for name in own}, state.models[absent])
    other = next(group for group in DEPTHS if group != absent)
    for name in state.stack.stem:
        np.testing.assert_array_equal(new.models[absent][name], new.models[other][name])
        assert not np.array_equal(new.models[absent][name], state.models[absent][name])
    assert all(
        np.isfinite(value).all() for model in new.models.values() for value in model.values()
    )


def test_a_round_without_anybody_changes_nothing(layout):
    """No division by zero, no NaN."""
    chosen = InclusiveSettings()
    state = inclusivefl.init(layout, DEPTHS, noise(layout), chosen)
    new, seen = inclusivefl.apply(state, {}, {}, chosen)
    assert all(same(new.models[group], state.models[group]) for group in DEPTHS)
    assert not seen.stepped


def test_distillation_only_leaves_the_groups_apart(layout):
    """Without sharing each group is what its optimizer made of it."""
    chosen = BASELINES["distillation_only"].settings(InclusiveSettings(0.5))
    state = inclusivefl.init(layout, DEPTHS, noise(layout), chosen)
    new, seen = inclusivefl.apply(state, updates_of(state), dict.fromkeys(DEPTHS, 1), chosen)
    assert all(same(new.models[group], seen.stepped[group]) for group in DEPTHS)
    assert BASELINES["without_distillation"].settings(InclusiveSettings(0.5)).beta == 0


def test_the_state_before_a_round_is_unchanged_by_it(layout):
    """A round that is abandoned can be run again from the same state."""
    chosen = InclusiveSettings()
    state = inclusivefl.init(layout, DEPTHS, noise(layout), chosen)
    updates = updates_of(state)
    counts = dict.fromkeys(DEPTHS, 1)
    one, _ = inclusivefl.apply(state, updates, counts, chosen)
    two, _ = inclusivefl.apply(state, updates, counts, chosen)
    assert all(same(one.models[group], two.models[group]) for group in DEPTHS)


def test_a_killed_server_goes_on_from_the_stored_arrays(layout):
    """Models, moments and momenta are one flat mapping; what is read back goes on as if nothing had
    happened.
    """
    chosen = InclusiveSettings(0.5)
    state = inclusivefl.init(layout, DEPTHS, noise(layout), chosen)
    counts = dict.fromkeys(DEPTHS, 1)
    state, _ = inclusivefl.apply(state, updates_of(state), counts, chosen)
    stored = {name: np.array(value) for name, value in state_tensors(state).items()}
    again = state_from_tensors(layout, DEPTHS, stored)
    updates = updates_of(state, 1)
    straight, _ = inclusivefl.apply(state, updates, counts, chosen)
    resumed, _ = inclusivefl.apply(again, updates, counts, chosen)
    for group in DEPTHS:
        assert same(straight.models[group], resumed.models[group])
    assert all(map(np.array_equal, straight.momenta["strong"], resumed.momenta["strong"]))
    stored.pop("weak/model/head.bias")
    with pytest.raises(PlanError, match=r"group weak lacks head\.bias"):
        state_from_tensors(layout, DEPTHS, stored)


def test_ladder_of_the_paper():
    """4, 8 and 12 layers (vector I2), in whatever order the groups are named."""
    ladder = Ladder.from_depths({"c": 12, "a": 4, "b": 8})
    assert ladder.groups == ("a", "b", "c")
    assert list(ladder.momentum_layers("c")) == [8, 9, 10, 11, 12]
    assert not ladder.momentum_layers("a")
    assert [ladder.owners(layer) for layer in (0, 3, 4, 8, 12)] == [
        ("a", "b", "c"),
        ("a", "b", "c"),
        ("b", "c"),
        ("c",),
        ("c",),
    ]
    assert ladder.shares(5, {"a": 4}) is None


def test_what_cannot_be_stacked_is_refused(layout):
    """Before any training: equal depths, too many layers, a model without a depth unit, unknown
    groups.
    """
    weights = noise(layout)
    chosen = InclusiveSettings()
    for depths in ({}, {"a": 2, "b": 2}, {"a": 0}, {"a": 5}):
        with pytest.raises(PlanError):
            inclusivefl.init(layout, depths, weights, chosen)
    with pytest.raises(PlanError, match=r"cut\.depth"):
        stack_of(infer_layout(Registry.zoo().get("mlp")))
    state = inclusivefl.init(layout, DEPTHS, weights, chosen)
    updates = updates_of(state)
    with pytest.raises(
        PlanError, match="group huge does not exist; the groups are weak, medium, strong"
    ):
        inclusivefl.apply(state, updates, {"huge": 1}, chosen)
    with pytest.raises(PlanError, match="no update"):
        inclusivefl.apply(state, {}, {"weak": 1}, chosen)
    with pytest.raises(PlanError, match="missing"):
        inclusivefl.apply(state, {"weak": {}}, {"weak": 1}, chosen)
