"""Choosing a tier on the board: what must be measured first, what is remembered, and what survives
a restart.
"""

import math
from typing import Any

import pytest

from device_runtime.training.choosers import RULES, Situation, TierChooser, chooser_of
from device_runtime.training.choosers.adaptive import CUTS, level
from device_runtime.training.choosers.memory import ChooserMemory
from device_runtime.training.choosers.rule import cost_of, depth_of, width_of
from device_runtime.training.choosers.whalefl import Memory
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.messages import Chooser, Instructions, TrainSettings
from fleet_protocol.sizing import Sizing, SizingConstants

TRAIN = TrainSettings(learning_rate=0.1, epochs=1, batch_size=1, seed=0)
CONSTANTS = SizingConstants(theta=4.0, stall=10.0, step=0.5, gamma=1.0)
OFFERED = ("w1.00-d2", "w0.50-d2", "w0.25-d2", "w0.125-d2")


def named(rule: str, settings: Any) -> TierChooser:
    found = chooser_of(Instructions(train=TRAIN, chooser=Chooser(rule=rule, settings=settings)))
    assert found is not None
    return found


def sized(constants: SizingConstants = CONSTANTS, full_bytes: int = 1000) -> TierChooser:
    return named("whalefl", sizing_json(constants, full_bytes))


def sizing_json(constants: SizingConstants, full_bytes: int) -> dict[str, Any]:
    sizing = Sizing(constants=constants, full_bytes=full_bytes)
    return sizing.model_dump(mode="json", by_alias=True)


def learnt(*losses: float) -> Memory:
    memory = None
    for number, loss in enumerate(losses, 1):
        memory = sized().learn(memory, number, loss)
    assert isinstance(memory, Memory)
    return memory


def choose(memory, chooser=None, *, speed=1000.0, offered=OFFERED, step=0.1):
    return (chooser or sized()).choose(memory, Situation(offered, 10, speed, step)).tier


def test_what_is_not_known_is_no_reason_to_grow():
    """Without a step time or a link speed there is no utility."""
    assert choose(None, step=None) == "w0.125-d2"
    assert choose(None, speed=None) == "w0.125-d2"
    # SE = 1 / 1 s + 1 / (10 * 0.1 s) = 2 of Theta 4, so Un = 0.5.
    assert choose(None) == "w0.25-d2"
    assert choose(None, offered=("w0.125-d2",)) == "w0.125-d2"


def test_a_choice_is_by_the_times_of_its_own_round():
    """A board that was slow, or had a slow link, is no slower than it is now."""
    memory = learnt(100.0, 200.0)
    # SE = 1 + 1 / 2 = 1.5 of 4, so Un = 0.375; then 1 + 1 / 0.2 is above Theta; then 0.1 + 1 of 4.
    assert [choose(memory, step=0.2), choose(memory, step=0.02)] == ["w0.125-d2", "w1.00-d2"]
    assert choose(memory, speed=100.0) == "w0.125-d2"


def test_the_arm_with_a_fixed_speed_needs_no_measurement():
    """U = TE^gamma = 1 of Theta 1.5."""
    assert (
        choose(None, sized(SizingConstants(arm="training", theta=1.5), 1), speed=None, step=None)
        == "w0.50-d2"
    )


SHARED = ("w1.00-d2", "w1.00-d2-t0.50", "w1.00-d2-head", "w0.50-d2", "w0.50-d2-head")
BY_COST = ("w0.50-d2-head", "w0.50-d2", "w1.00-d2-head", "w1.00-d2-t0.50", "w1.00-d2")


def test_among_trained_shares_the_cost_of_a_step_decides():
    """A step costs its width squared times (1 + 2 t) / 3: the head of the whole model costs more
    than half of its width, and less than half of its blocks.
    """
    assert sorted(SHARED, key=cost_of) == list(BY_COST)
    assert [round(12 * cost_of(tier)) for tier in BY_COST] == [1, 3, 4, 8, 12]
    # SE = 1 / T_cm + 1 / T_cp of Theta 4, with T_cm a second.
    steps = (0.5, 0.1, 0.06, 0.04, 0.02)
    taken = [choose(None, offered=SHARED, step=step) for step in steps]
    # 1.2, 2, 2.67, 3.5 and 6 of 4: the bounds between five tiers are fifths.
    assert taken == [BY_COST[1], BY_COST[2], BY_COST[3], BY_COST[4], BY_COST[4]]
    assert choose(None, offered=SHARED, speed=None) == BY_COST[0]
    assert choose(None, offered=SHARED[:2], step=0.1) == SHARED[0]
    assert choose(None, offered=SHARED[:2], step=0.5) == SHARED[1]


def test_five_levels_have_the_bounds_of_the_paper():
    """Equation 8 has five widths."""
    for place, (bound, _width) in enumerate(reversed(CUTS), 1):
        assert level(bound, 5) == place
        assert level(math.nextafter(bound, 0), 5) == place - 1


def test_a_round_counts_once():
    """A task that was computed again after a power cut does not stall twice."""
    once = learnt(1.0)
    assert sized().learn(once, 1, 1.0) is once
    assert learnt(1.0, 1.0).progress.training_efficiency == 1.5


def test_of_tiers_of_one_width_the_first_offered_is_taken():
    """The server's order decides what the rule has no opinion about."""
    assert choose(None, offered=("w1.00-d2", "w0.50-d4", "w0.50-d2"), step=None) == "w0.50-d4"


def test_the_memory_survives_a_restart_and_belongs_to_one_run_and_rule(tmp_path):
    """Another run, and a damaged file, start afresh."""
    chooser = sized()
    kept = learnt(1.0)
    assert ChooserMemory(tmp_path).load("r", chooser) is None
    ChooserMemory(tmp_path).save("r", chooser, kept)
    assert ChooserMemory(tmp_path).load("r", chooser) == kept
    assert ChooserMemory(tmp_path).load("other", chooser) is None
    text = ChooserMemory(tmp_path).path.read_text()
    for damaged in (
        "{",
        text.replace('"whalefl"', '"another"'),
        text.replace('"round": 1', '"round": "first"'),
    ):
        ChooserMemory(tmp_path).path.write_text(damaged)
        assert ChooserMemory(tmp_path).load("r", chooser) is None


def test_what_an_offer_says_wrong_about_the_choice_is_refused_by_name():
    """A rule of a later version, and a setting that is none, are named; without a chooser there is
    no choice.
    """
    assert chooser_of(Instructions(train=TRAIN)) is None
    with pytest.raises(RefusedError, match=f"no rule 'dice'.*it has {', '.join(RULES)}") as unknown:
        named("dice", {})
    assert unknown.value.reason is RefusalReason.UNSUPPORTED
    with pytest.raises(
        RefusedError, match=r"settings of the chooser whalefl: full_bytes: Field required"
    ) as missing:
        named("whalefl", {"constants": {}})
    assert missing.value.reason is RefusalReason.MALFORMED
    with pytest.raises(
        RefusedError, match=r"whalefl: constants\.theta: Input should be greater than 0"
    ):
        named("whalefl", {"constants": {"theta": 0}, "full_bytes": 1})


def test_the_shape_of_a_tier_stands_in_its_id():
    """What is no tier is wider and deeper than any board allows."""
    assert (width_of("w0.25-d12"), depth_of("w0.25-d12")) == (0.25, 12)
    assert (width_of("wide"), depth_of("wide")) == (float("inf"), float("inf"))
