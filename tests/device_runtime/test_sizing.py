"""Choosing a tier on the board: what must be measured first, what is remembered, and what survives a restart."""

import pytest

from device_runtime.sizing import SizingStore, after_round, choose_width
from fleet_protocol.messages import Sizing
from fleet_protocol.sizing import WhaleSettings

SIZING = Sizing(settings=WhaleSettings(theta=4.0, stall=10.0, step=0.5, gamma=1.0), full_bytes=1000)
OFFERED = (1.0, 0.5, 0.25, 0.125)


@pytest.fixture
def fresh(tmp_path):
    return SizingStore(tmp_path).load("r", SIZING)


def choose(record, sizing=SIZING, *, speed=1000.0, offered=OFFERED):
    return choose_width(record, sizing, offered, steps=10, bytes_per_second=speed)


def test_what_is_not_measured_is_measured_with_the_narrowest_tier(fresh):
    """Without a step time or a link speed there is no utility."""
    timed = after_round(fresh, SIZING, number=1, width=0.125, step_seconds=0.1, loss=1.0)
    assert choose(fresh) == 0.125
    assert choose(timed, speed=None) == 0.125
    # SE = 1 / 1 s + 1 / (10 * 0.1 s) = 2 of Theta 4, so Un = 0.5.
    assert choose(timed) == 0.25
    assert choose(timed, offered=(0.125,)) == 0.125


def test_a_board_that_slows_down_scales_the_time_of_the_narrowest_tier(fresh):
    """A wider tier that takes twice as long as before means that the narrowest would as well."""
    record = fresh
    for number, (width, seconds) in enumerate([(0.125, 0.1), (0.5, 0.4), (0.5, 0.8)], 1):
        record = after_round(record, SIZING, number=number, width=width, step_seconds=seconds, loss=100.0 * number)
    assert record.drift == pytest.approx(2.0)
    assert record.step_seconds == {"0.125": 0.1, "0.5": 0.4}
    # SE = 1 + 1 / 2 = 1.5 of 4, so Un = 0.375.
    assert choose(record) == 0.125


def test_the_arm_with_a_fixed_speed_needs_no_measurement(fresh):
    """U = TE^gamma = 1 of Theta 1.5."""
    sizing = Sizing(settings=WhaleSettings(arm="training", theta=1.5), full_bytes=1)
    assert choose(fresh, sizing, speed=None) == 0.5


def test_a_round_counts_once(fresh):
    """A task that was computed again after a power cut does not stall twice."""
    once = after_round(fresh, SIZING, number=1, width=1.0, step_seconds=0.1, loss=1.0)
    assert after_round(once, SIZING, number=1, width=1.0, step_seconds=9.0, loss=1.0) is once
    twice = after_round(once, SIZING, number=2, width=1.0, step_seconds=0.1, loss=1.0)
    assert twice.state.training_efficiency == 1.5


def test_the_record_survives_a_restart_and_belongs_to_one_run(tmp_path, fresh):
    """Another run, and a damaged file, start afresh."""
    kept = after_round(fresh, SIZING, number=3, width=1.0, step_seconds=0.1, loss=1.0)
    SizingStore(tmp_path).save(kept)
    assert SizingStore(tmp_path).load("r", SIZING) == kept
    assert SizingStore(tmp_path).load("other", SIZING).round == 0
    SizingStore(tmp_path).path.write_text("{")
    assert SizingStore(tmp_path).load("r", SIZING) == fresh
