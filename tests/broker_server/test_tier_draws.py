"""Federated Dropout whose devices train the same units, so that a secure sum can add them."""

import numpy as np
import pytest

from broker_server.strategies.fedrolex import plan_window
from broker_server.strategies.strategy import PlanRequest
from broker_server.strategies.traits import Trait
from fleet_protocol.errors import PlanError
from models import Tier, Window
from tests.broker_server.methods import built
from tests.broker_server.test_fedrolex import LAYOUT
from tests.broker_server.test_refused_runs import prepare

SUMS = {"secure_sum": {"clip": 1.0}, "evaluation": {"statistics": "server-batch"}}
RANDOM = Window(kind="random")


def units(device, version, *, tier_draws):
    """The units of a device in a round."""
    request = PlanRequest(Tier(0.5), device, version, 7)
    planned = plan_window(LAYOUT, request, RANDOM, tier_draws=tier_draws)
    return planned.key, planned.plan.indices["k"].tolist()


def test_devices_of_a_tier_share_a_draw_that_changes_with_the_round():
    drawn = [units("a", version, tier_draws=True) for version in range(20)]
    assert [units("b", version, tier_draws=True) for version in range(20)] == drawn
    assert len({tuple(kept) for _, kept in drawn}) > 5
    alone = [units("a", version, tier_draws=False) for version in range(20)]
    assert [units("b", version, tier_draws=False) for version in range(20)] != alone
    assert {key for key, _ in drawn} == {"w0.50-d1"}
    assert {key for key, _ in alone} == {"w0.50-d1/a"}
    # Over many rounds, every unit is drawn equally often.
    counts = np.zeros(6)
    for version in range(600):
        counts[units("a", version, tier_draws=True)[1]] += 1
    assert np.abs(counts - 300).max() < 60


def test_only_shared_draws_go_with_secure_sums(config):
    """The plans still change from round to round, which other features need to know."""
    tables = {"name": "federated_dropout", "federated_dropout": {"drawn_for": "tier"}}
    context = prepare(config, strategy=tables, **SUMS)
    assert context.keeps(Trait.SHARED_PLANS)
    assert Trait.FIXED_PLANS in built(tables, LAYOUT).breaks
    with pytest.raises(PlanError, match="all devices of a tier train the same units"):
        prepare(config, strategy={"name": "federated_dropout"}, **SUMS)
    assert Trait.SHARED_PLANS in built({"name": "federated_dropout"}, LAYOUT).breaks
