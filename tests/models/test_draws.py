"""Which units a plan keeps: balance of rolling windows, distinct random draws, heads that stay
whole.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import Axis
from models.draws import random_units, rolling_units

SIZES = st.integers(1, 40)
WIDTHS = st.floats(0.01, 1.0)


@st.composite
def grouped_axes(draw):
    """An axis with one to four groups."""
    groups = draw(st.integers(1, 4))
    return Axis("a", draw(SIZES) * groups, groups=groups)


@given(grouped_axes(), WIDTHS)
def test_static_units_are_the_leading_ones_of_every_group(axis, width):
    """A narrower static model lies inside every wider one."""
    units = rolling_units(axis, width, shift=0).reshape(axis.groups, -1)
    assert [list(row - row[0]) for row in units] == [list(range(units.shape[1]))] * axis.groups
    assert list(units[:, 0]) == list(range(0, axis.size, axis.group_size))


@given(grouped_axes(), WIDTHS, st.integers(1, 3))
def test_rolling_covers_every_unit_equally_often(axis, width, laps):
    """Over as many rounds as a group has units, each unit is kept exactly as often as any other."""
    counts = np.zeros(axis.size, dtype=int)
    for round_index in range(laps * axis.group_size):
        counts[rolling_units(axis, width, shift=round_index)] += 1
    assert set(counts) == {laps * axis.kept(width) // axis.groups}


@given(SIZES, WIDTHS, st.integers(0, 100))
def test_rolling_down_is_rolling_up_backwards(size, width, shift):
    """The released code's window of round j is the paper's of round -j."""
    axis = Axis("a", size)
    down = rolling_units(axis, width, shift=shift, direction="down")
    assert list(down) == list(rolling_units(axis, width, shift=-shift))


@given(grouped_axes(), WIDTHS, st.integers(0, 2**31), st.integers(0, 10_000))
def test_random_units_are_distinct_sorted_and_alike_in_every_group(axis, width, seed, round_index):
    """A draw keeps the same offsets in each head, and never a unit twice."""
    units = random_units(axis, width, seed=seed, round_index=round_index, label="a")
    assert units.size == axis.kept(width)
    assert (np.diff(units) > 0).all()
    rows = units.reshape(axis.groups, -1) % axis.group_size
    assert (rows == rows[0]).all()


def test_random_draws_are_reproducible_and_differ_by_seed_round_and_label():
    """A draw is a function of its arguments alone; the numbers are fixed so that runs can be
    repeated.
    """
    axis = Axis("a", 64)
    base = {"seed": 1, "round_index": 2, "label": "a"}
    first = random_units(axis, 0.25, **base)
    assert list(first) == list(random_units(axis, 0.25, **base))
    for change in ({"seed": 2}, {"round_index": 3}, {"label": "b"}):
        assert list(first) != list(random_units(axis, 0.25, **{**base, **change}))


def test_random_units_are_uniform():
    """Each unit is kept with probability n/K: 400 draws of 2 in 8 stay within five deviations."""
    axis = Axis("a", 8)
    rounds = 400
    counts = np.zeros(8)
    for round_index in range(rounds):
        counts[random_units(axis, 0.25, seed=0, round_index=round_index, label="a")] += 1
    expected = rounds * 0.25
    deviation = np.sqrt(rounds * 0.25 * 0.75)
    assert counts.sum() == 2 * rounds
    assert np.abs(counts - expected).max() < 5 * deviation


@given(grouped_axes(), WIDTHS, st.integers(0, 100), st.sampled_from(["up", "down"]))
def test_a_window_keeps_its_order_inside_every_group(axis, width, shift, direction):
    """Group after group, each from the window's start upwards and around the group's own end."""
    start = shift if direction == "up" else -shift
    kept = axis.kept(width) // axis.groups
    expected = [
        group * axis.group_size + (start + place) % axis.group_size
        for group in range(axis.groups)
        for place in range(kept)
    ]
    assert list(rolling_units(axis, width, shift=shift, direction=direction)) == expected


@pytest.mark.parametrize(
    ("options", "units"),
    [
        ({"shift": 0}, [0, 1, 2, 4, 5, 6, 8, 9, 10]),
        ({"shift": 3}, [3, 0, 1, 7, 4, 5, 11, 8, 9]),
        ({"shift": 7}, [3, 0, 1, 7, 4, 5, 11, 8, 9]),
        ({"shift": 2, "direction": "down"}, [2, 3, 0, 6, 7, 4, 10, 11, 8]),
        ({"shift": 3, "heads": "as_released"}, [3, 4, 5, 7, 8, 9, 11, 0, 1]),
        ({"shift": 1, "heads": "as_released", "direction": "down"}, [11, 0, 1, 3, 4, 5, 7, 8, 9]),
    ],
)
def test_three_heads_of_four_units_by_hand(options, units):
    """Three of four units each; the released rule rolls all twelve before it cuts them into
    heads.
    """
    assert list(rolling_units(Axis("a", 12, groups=3), 0.75, **options)) == units


@pytest.mark.parametrize("shift", [1, 3])
def test_a_head_preserving_window_never_mixes_heads(shift):
    """Local head h holds units of global head h alone; the released rule mixes two."""
    axis = Axis("a", 8, groups=2)
    kept = rolling_units(axis, 0.5, shift=shift).reshape(2, -1) // 4
    assert (kept == [[0, 0], [1, 1]]).all()
    mixed = rolling_units(axis, 1.0, shift=shift, heads="as_released").reshape(2, -1) // 4
    assert not (mixed == mixed[:, :1]).all()
