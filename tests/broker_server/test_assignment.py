"""Levels, who gets them, who takes part, and learning rates by round."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_server.settings.assignment import LEVEL_RATES, assign_dynamic, assign_fix, parse_mix
from broker_server.settings.fleet import TrainConfig
from fleet_protocol.errors import ConfigError


def test_a_mix_is_read_and_widths_are_relative_to_its_first_level():
    """``b1-e1``: the global model is level b, and an e device trains an eighth of it (specification
    1.1).
    """
    mix = parse_mix("b1-e1")
    assert [(level.name, level.rate, level.weight) for level in mix.levels] == [
        ("b", 0.5, 1),
        ("e", 0.0625, 1),
    ]
    assert mix.width(LEVEL_RATES["e"]) == 0.125


@pytest.mark.parametrize(
    "text", ["", "a", "a2-", "2a", "a-1", "z3", "a1-a2", "a0", "b1-a1", "a1.5", "A2", "a1_b2"]
)
def test_other_texts_are_refused(text):
    """Each with the reason; a level wider than the global model among them."""
    with pytest.raises(ConfigError):
        parse_mix(text)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(1, 60))
def test_fixed_levels_go_in_order_and_the_rest_gets_the_last(weights, devices):
    """Every device has a level, rates never rise from one device to the next, and units are
    whole.
    """
    text = "-".join(f"{level}{weight}" for level, weight in zip(LEVEL_RATES, weights, strict=False))
    if not sum(weights):
        return
    rates = assign_fix(parse_mix(text), devices)
    assert len(rates) == devices
    assert list(rates) == sorted(rates, reverse=True)
    unit = devices // sum(weights)
    counts = Counter(rates)
    for weight, rate in list(zip(weights, LEVEL_RATES.values(), strict=False))[:-1]:
        assert counts[rate] == unit * weight


def test_a_level_of_weight_zero_sets_the_global_model_alone():
    """FedRolex's larger server model (specification 2.8)."""
    assert set(assign_fix(parse_mix("a0-b99"), 99)) == {0.5}
    assert parse_mix("a0-b99").width(0.5) == 0.5


def test_dynamic_levels_are_drawn_anew_by_weight():
    """A function of seed and round; over many devices the shares are those of the weights."""
    mix = parse_mix("a1-e3")
    first = assign_dynamic(mix, 4000, seed=3, round_index=0)
    assert first == assign_dynamic(mix, 4000, seed=3, round_index=0)
    assert first != assign_dynamic(mix, 4000, seed=3, round_index=1)
    assert first != assign_dynamic(mix, 4000, seed=4, round_index=0)
    share = Counter(first)[1.0] / 4000
    assert abs(share - 0.25) < 5 * (0.25 * 0.75 / 4000) ** 0.5


def test_milestones_act_after_their_round_or_in_it():
    """HeteroFL steps the schedule after the round, FedRolex before it."""
    train = TrainConfig(learning_rate=1.0, milestones=(3,), factor=0.5)
    assert [train.rate_after(closed) for closed in range(5)] == [1.0, 1.0, 1.0, 0.5, 0.5]
    early = train.model_copy(update={"schedule": "before"})
    assert [early.rate_after(closed) for closed in range(4)] == [1.0, 1.0, 0.5, 0.5]
    assert train.model_copy(update={"milestones": (2, 3)}).rate_after(8) == 0.25
