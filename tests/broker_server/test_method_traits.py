"""What each method states of itself in its module, beside what its built strategy does."""

import numpy as np
import pytest

from broker_server.rounds.run_method import RunMethod, _described
from broker_server.settings.combinations import method_settings
from broker_server.settings.fleet import FleetConfig
from broker_server.settings.method_features import evident_features, method_features
from broker_server.strategies.private_parts import PrivateModel, keep_private
from broker_server.strategies.registry import STRATEGIES, build_strategy
from broker_server.strategies.strategy import Contribution, PlanRequest
from broker_server.strategies.traits import Trait
from fleet_protocol.errors import PlanError
from fleet_protocol.messages import TaskMetrics
from models import Registry, Tier, compile_plan, infer_layout
from tests.broker_server.artifacts import tiny_layout
from tests.broker_server.methods import merged
from tests.broker_server.test_low_rank import LAYOUT as ADAPTERS
from tests.models.layouts import noise

METRICS = TaskMetrics(
    examples=7, batches=1, labels=(), fetch_seconds=0, train_seconds=0, resident_bytes=0
)

ENCODER = {
    "embed": 8,
    "heads": 2,
    "ffn": 6,
    "blocks": 4,
    "vocab": 11,
    "input_shape": (5,),
    "classes": 3,
}
UNSTATED = {Trait.OPEN_MERGE, Trait.TIER_HEADS, Trait.NO_STATISTICS, Trait.COMMON_ROUTINE}
"""What a method does not offer, and what settings of the evaluation do: no module states these."""

STATED_ONLY = frozenset({Trait.PIECES})
"""The server does not see how a routine of devices computes: only the method's module knows."""

STATED_NEEDS = frozenset({Trait.FIXED_PLANS, Trait.ONE_VERSION, Trait.ALL_MERGED})
"""What the memory of devices needs, which no plan, instruction or merge shows."""

EVERY_METHOD = [
    ({"name": "heterofl"}, set()),
    ({"name": "heterofl", "plan": "rolling"}, {Trait.FIXED_PLANS}),
    ({"name": "heterofl", "plan": "random"}, {Trait.FIXED_PLANS, Trait.SHARED_PLANS}),
    ({"name": "fedavg"}, set()),
    ({"name": "fedprox", "fedprox": {"mu": 0.1}}, set()),
    ({"name": "fedmedian"}, {Trait.MEAN_OF_CHANGES}),
    ({"name": "fedrolex"}, {Trait.FIXED_PLANS}),
    ({"name": "fedrolex", "fedrolex": {"window": "static"}}, set()),
    (
        {"name": "fedrolex", "fedrolex": {"weighting": "width"}},
        {Trait.FIXED_PLANS, Trait.MEAN_OF_CHANGES},
    ),
    ({"name": "depthfl"}, set()),
    (
        {"name": "depthfl", "depthfl": {"feddyn": {"fleet_devices": 9}}},
        {Trait.MEAN_OF_CHANGES},
    ),
    ({"name": "feddyn", "feddyn": {"fleet_devices": 9}}, {Trait.MEAN_OF_CHANGES}),
    ({"name": "scalefl"}, set()),
    ({"name": "federated_dropout"}, {Trait.FIXED_PLANS, Trait.SHARED_PLANS}),
    ({"name": "whalefl"}, {Trait.ASSIGNED_TIERS}),
    ({"name": "fml"}, {Trait.MEAN_OF_CHANGES, Trait.PIECES}),
    ({"name": "hetlora"}, {Trait.MEAN_OF_CHANGES}),
    ({"name": "flexlora"}, {Trait.MEAN_OF_CHANGES, Trait.FIXED_PLANS}),
    ({"name": "inclusivefl"}, {Trait.MEAN_OF_CHANGES}),
    (
        {"name": "inclusivefl", "inclusivefl": {"baseline": "local"}},
        {Trait.MEAN_OF_CHANGES, Trait.SHARED_PLANS},
    ),
]


@pytest.fixture(scope="module")
def encoder():
    return infer_layout(Registry.zoo().get("text_encoder"), ENCODER)


def configured(table):
    return FleetConfig.model_validate(
        {"fleet": "f", "model": {"artifacts": "sets", "arch": "tiny"}, "strategy": table}
    )


# Their server keeps something about every parameter of each device.
NEEDS_ALL_MERGED = [
    str(table)
    for table, _ in EVERY_METHOD
    if table["name"] == "feddyn" or "feddyn" in table.get("depthfl", {}) or "local" in str(table)
]


def built_method(table, encoder):
    config = configured(table)
    layout = tiny_layout()
    tiers = (Tier(1.0), Tier(0.5))
    if table["name"] in {"hetlora", "flexlora"}:
        layout = ADAPTERS
    elif table["name"] == "inclusivefl":
        layout = encoder
        tiers = (Tier(1.0, 4), Tier(1.0, 2), Tier(1.0, 1))
    strategy = build_strategy(method_settings(config), layout, tiers)
    return RunMethod(config, layout, strategy.tiers, strategy)


def test_every_method_is_here():
    """A new one states its traits too."""
    assert {table["name"] for table, _ in EVERY_METHOD} == set(STRATEGIES)


@pytest.mark.parametrize(
    ("table", "breaks"), EVERY_METHOD, ids=[str(table) for table, _ in EVERY_METHOD]
)
def test_a_module_states_what_its_strategy_does(table, breaks, encoder):
    """No module states more or less than its plans, instructions and merge show."""
    method = built_method(table, encoder)
    evident = evident_features(method.config, _described(method))
    broken = frozenset().union(*(feature.breaks for feature in evident))
    needed = frozenset().union(*(feature.needs for feature in evident))
    assert method.strategy.breaks == breaks
    assert breaks - STATED_ONLY == broken - UNSTATED
    assert method.strategy.needs - needed <= STATED_NEEDS
    assert needed <= method.strategy.needs
    # What is evident is refused in words of its own: nothing is left for the general ones.
    stated = method_features(method.config, _described(method))[0]
    assert stated.needs <= STATED_NEEDS
    assert stated.breaks <= STATED_ONLY


@pytest.mark.parametrize(
    ("table", "breaks"), EVERY_METHOD, ids=[str(table) for table, _ in EVERY_METHOD]
)
def test_a_method_merges_what_private_parts_leave_or_is_refused(table, breaks, encoder):
    """No method fails in a round because updates lack what stays on the devices."""
    del breaks
    method = built_method(table, encoder)
    if Trait.ALL_MERGED in method.strategy.needs:
        # `combinations` refuses the run.
        assert str(table) in NEEDS_ALL_MERGED
        return
    # A vector of the last layer, which no width cuts; or half of an adapter.
    private = "a.down" if method.layout is ADAPTERS else method.layout.parameters[-1].name
    kept = PrivateModel((private,))
    if method.strategy.renews_units and method.layout is ADAPTERS:
        with pytest.raises(PlanError, match=r"devices keep a\.down, but strategy flexlora"):
            keep_private(method.strategy, method.layout, kept)
        return
    strategy = keep_private(method.strategy, method.layout, kept)
    old = noise(method.layout, 0)
    updates = []
    for number, tier in enumerate(strategy.tiers, 1):
        planned = strategy.plan(PlanRequest(tier, f"d{number}", 0, 0))
        plan = compile_plan(method.layout, planned.plan)
        weights = plan.slice(noise(method.layout, number))
        for name in strategy.stays:
            weights.pop(name, None)
        shared = plan.without(strategy.stays)
        metrics = METRICS.model_copy(update={"labels": tuple(range(method.layout.classes))})
        updates.append(Contribution(f"d{number}", tier, planned.key, shared, weights, metrics))
    new = merged(strategy, updates, old)
    changed = {name for name, value in old.items() if not np.array_equal(value, new[name])}
    assert changed == old.keys() - set(strategy.stays)
