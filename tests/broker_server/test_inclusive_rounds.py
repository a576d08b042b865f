"""InclusiveFL as a strategy: what each group is sent, what a round makes of its updates, and its
baselines.
"""

from dataclasses import replace

import numpy as np
import pytest

from broker_server.strategies import inclusivefl
from broker_server.strategies.inclusive_state import state_from_tensors
from broker_server.strategies.inclusivefl import InclusiveSettings
from broker_server.strategies.optimizer_rules import OptimizerSettings
from broker_server.strategies.strategy import Contribution, GlobalModel, PlanRequest
from fleet_protocol.errors import PlanError
from fleet_protocol.messages import TaskMetrics
from models import Registry, Tier, compile_plan, infer_layout
from tests.broker_server.methods import built
from tests.models.layouts import noise

TIERS = (Tier(1.0, 4), Tier(1.0, 2), Tier(1.0, 1))
PLAIN = OptimizerSettings(name="plain")
DEVICES = {"a": TIERS[0], "b": TIERS[1], "c": TIERS[1], "d": TIERS[2]}


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


def made(layout, baseline="inclusive", optimizer=PLAIN):
    config = {"name": "inclusivefl", "inclusivefl": {"baseline": baseline, "beta": 0.5}}
    return built(config, layout, TIERS[::-1], optimizer)


def one_round(method, layout, weights, state, version, devices=DEVICES, stays=()):
    """Every device adds a constant of its own to what it is sent, and does not send what stays;
    gives what was sent and the new weights and state.
    """
    sums = method.merge.start()
    sent = {}
    for number, (device, tier) in enumerate(devices.items(), 1):
        request = PlanRequest(tier, device, version, 0)
        planned = method.plan(request)
        plan = compile_plan(layout, planned.plan)
        sent[device] = dict(method.send(plan, request, GlobalModel(weights, state)))
        update = {}
        for name in sent[device].keys() - set(stays):
            update[name] = sent[device][name] + np.float32(number)
        metrics = TaskMetrics(
            examples=1, batches=1, labels=(0,), fetch_seconds=0, train_seconds=0, resident_bytes=0
        )
        method.merge.fold(sums, Contribution(device, tier, planned.key, plan, update, metrics))
    new = method.merge.finish(sums, GlobalModel(weights, state))
    return sent, new.weights, new.state


def test_a_round_is_the_method_over_the_groups_means(layout):
    """Sending, folding and stepping are those of `inclusivefl.apply`, round after round, through
    the stored state.
    """
    method = made(layout)
    weights = noise(layout)
    state = {}
    groups = {"d1": 1, "d2": 2, "d4": 4}
    expected = inclusivefl.init(layout, groups, weights, InclusiveSettings(0.5, PLAIN))
    for version in range(3):
        sent, weights, state = one_round(method, layout, weights, state, version)
        for device, tier in DEVICES.items():
            own = expected.models[f"d{tier.depth}"]
            assert set(sent[device]) == set(own)
            for name, value in own.items():
                np.testing.assert_array_equal(sent[device][name], value)
        steps = {"d4": 1.0, "d2": 2.5, "d1": 4.0}
        updates = {
            group: {name: np.full_like(value, steps[group]) for name, value in model.items()}
            for group, model in expected.models.items()
        }
        expected, _ = inclusivefl.apply(
            expected, updates, {"d4": 1, "d2": 2, "d1": 1}, InclusiveSettings(0.5, PLAIN)
        )
        for name, value in expected.models["d4"].items():
            np.testing.assert_allclose(weights[name], value, atol=1e-4)
        expected = state_from_tensors(layout, groups, state)


def test_a_group_without_devices_keeps_its_top_and_receives_what_is_shared(layout):
    """Its top layer and head stay; the bottom follows the others."""
    method = made(layout)
    weights = noise(layout)
    present = {"a": TIERS[0], "b": TIERS[1]}
    _, after, state = one_round(method, layout, weights, {}, 0, present)
    sent, _, _ = one_round(method, layout, after, state, 1)
    names = layout.shapes(TIERS[2])
    bottom = [name for name in names if name.startswith(("tokens", "positions"))]
    top = [name for name in names if name.startswith(("blocks.0", "head"))]
    assert bottom
    assert top
    assert all(not np.array_equal(sent["d"][name], weights[name]) for name in bottom)
    assert all(np.array_equal(sent["d"][name], weights[name]) for name in top)


@pytest.mark.parametrize("optimizer", [PLAIN, OptimizerSettings(name="fedadam")])
def test_what_stays_on_the_devices_keeps_its_values_in_every_group(layout, optimizer):
    """Although the momentum of deeper layers moves the other parameters of a group's top layer."""
    method = made(layout, optimizer=optimizer)
    first = weights = noise(layout)
    stays = [name for name in weights if name.startswith(("blocks.0.norm", "head"))]
    assert len(stays) > 2
    state = {}
    for version in range(3):
        sent, weights, state = one_round(method, layout, weights, state, version, stays=stays)
    for device, values in sent.items():
        for name, value in values.items():
            assert np.array_equal(value, first[name]) == (name in stays), (device, name)


@pytest.mark.parametrize(
    ("baseline", "tiers"),
    [
        ("all_large", TIERS[:1]),
        ("exclusive", TIERS[:1]),
        ("all_small", TIERS[2:]),
        ("without_distillation", TIERS),
    ],
)
def test_baselines_choose_the_tiers(layout, baseline, tiers):
    """One depth for everybody, or all of them."""
    assert made(layout, baseline).tiers == tiers


def test_a_fleet_of_small_models_leaves_the_upper_layers_alone(layout):
    """AllSmall is FedAvg of the smallest depth within the deepest model's weights."""
    weights = noise(layout)
    method = made(layout, "all_small")
    _, after, _ = one_round(method, layout, weights, {}, 0, {"a": TIERS[2], "b": TIERS[2]})
    kept = layout.shapes(TIERS[2])
    for name, value in weights.items():
        np.testing.assert_allclose(after[name], value + (1.5 if name in kept else 0.0), atol=1e-5)


OWN = {TIERS[1]: 5, TIERS[2]: 7}


@pytest.fixture(scope="module")
def headed(layout):
    """The model with heads of their own for the two shallower tiers, and what these start from."""
    own = replace(layout, heads={tier.id: classes for tier, classes in OWN.items()})
    rng = np.random.default_rng(8)
    heads = {
        tier: {
            item.name: rng.standard_normal(own.shapes(tier)[item.name]).astype(np.float32)
            for item in own.own_head(tier)
        }
        for tier in OWN
    }
    return own, heads


def test_groups_with_places_of_their_own_keep_their_heads_to_themselves(headed):
    """Each head starts from its own weights, moves by its own devices' updates alone, and lives in
    the state.
    """
    layout, heads = headed
    method = made(layout)
    weights = noise(layout)
    state = method.begin(weights, heads)
    sent, after, state = one_round(method, layout, weights, state, 0)
    again, last, _ = one_round(method, layout, after, state, 1)
    for device, tier in DEVICES.items():
        assert {name: value.shape for name, value in sent[device].items()} == layout.shapes(tier)
        head = heads.get(tier) or {
            item.name: weights[item.name] for item in layout.parameters if item.block == "head"
        }
        mean = np.mean([number for number, name in enumerate(DEVICES, 1) if DEVICES[name] == tier])
        for name, value in head.items():
            np.testing.assert_array_equal(sent[device][name], value)
            np.testing.assert_allclose(again[device][name], value + mean, atol=1e-5)
    shared = [name for name in layout.shapes(TIERS[2]) if name.startswith(("tokens", "positions"))]
    assert shared
    for name in shared:
        np.testing.assert_array_equal(again["a"][name], again["d"][name])
    assert {name: value.shape for name, value in last.items()} == {
        name: w.shape for name, w in weights.items()
    }


def test_alone_every_device_begins_with_the_head_of_its_tier(headed):
    """The baseline of the NER experiments: own head, own weights, nothing merged."""
    layout, heads = headed
    method = made(layout, "local", None)
    weights = noise(layout)
    state = method.begin(weights, heads)
    sent, after, state = one_round(method, layout, weights, state, 0)
    again, _, _ = one_round(method, layout, after, state, 1)
    for number, (device, tier) in enumerate(DEVICES.items(), 1):
        assert {name: value.shape for name, value in sent[device].items()} == layout.shapes(tier)
        for name, value in heads.get(tier, {}).items():
            np.testing.assert_array_equal(sent[device][name], value)
        for name, value in again[device].items():
            np.testing.assert_allclose(value, sent[device][name] + number, atol=1e-5)


def test_a_fleet_of_small_models_with_other_labels_leaves_the_global_head_alone(headed):
    """The shallow model's layers are in the global version, its head is for other labels."""
    layout, heads = headed
    method = made(layout, "all_small")
    weights = noise(layout)
    state = method.begin(weights, {TIERS[2]: heads[TIERS[2]]})
    _, after, _ = one_round(method, layout, weights, state, 0, {"a": TIERS[2], "b": TIERS[2]})
    own = {item.name for item in layout.own_head(TIERS[2])}
    for name, value in weights.items():
        trained = name in layout.shapes(TIERS[2]).keys() - own
        np.testing.assert_allclose(after[name], value + (1.5 if trained else 0.0), atol=1e-5)


def test_alone_every_device_gets_its_own_weights_back(layout):
    """Nothing is merged: the global model stays, and each device goes on from where it was."""
    method = made(layout, "local", None)
    weights = noise(layout)
    _, after, state = one_round(method, layout, weights, {}, 0)
    sent, last, _ = one_round(method, layout, after, state, 1)
    for number, device in enumerate(DEVICES, 1):
        for name, value in sent[device].items():
            np.testing.assert_allclose(value, weights[name] + number, atol=1e-5)
    assert all(np.array_equal(last[name], weights[name]) for name in weights)


def test_widths_and_a_missing_deepest_tier_are_refused(layout):
    """The method cuts by depth alone, and a run ends with the deepest model."""
    with pytest.raises(PlanError, match="no tier of width 1"):
        built({"name": "inclusivefl"}, layout, [Tier(0.5, 4)])
    with pytest.raises(PlanError, match="must be in use"):
        built({"name": "inclusivefl"}, layout, [Tier(1.0, 2)])
