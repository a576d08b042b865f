"""Sums are divided box by box, with the bits of a division entry by entry."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_server.strategies.division import divide, even_boxes

KERNEL = (3, 3)


@st.composite
def nested_weights(draw):
    """Weights of some nested widths, as an array that broadcasts along a kernel."""
    rows = draw(st.integers(1, 12))
    columns = draw(st.integers(1, 12))
    weights = np.zeros((rows, columns, 1, 1), np.float32)
    for _ in range(draw(st.integers(0, 4))):
        first_row = draw(st.integers(0, rows - 1))
        first_column = draw(st.integers(0, columns - 1))
        weights[first_row:, first_column:] += np.float32(draw(st.sampled_from([1.0, 3.0, 0.7])))
    return weights


def divided_by_entry(total, weights, old):
    """The specification, without boxes."""
    everywhere = np.broadcast_to(weights, total.shape)
    result = old.copy()
    np.divide(total, everywhere, out=result, where=everywhere != 0)
    return result


@given(nested_weights())
def test_boxes_give_the_bits_of_a_division_by_entry(weights):
    draw = np.random.default_rng(0)
    shape = (*weights.shape[:2], *KERNEL)
    total = draw.standard_normal(shape, np.float32)
    old = draw.standard_normal(shape, np.float32)
    expected = divided_by_entry(total, weights, old)
    divide(total, weights, old)
    assert np.array_equal(total, expected)


@given(nested_weights())
def test_boxes_hold_every_entry_once(weights):
    times_held = np.zeros(weights.shape, np.int64)
    for box, weight in even_boxes(weights):
        times_held[box] += 1
        assert (weights[box] == weight).all()
    assert (times_held == 1).all()


@pytest.mark.parametrize("has_gaps", [False, True])
def test_scattered_units_are_divided_entry_by_entry(has_gaps):
    """So many boxes would take longer than the division itself."""
    weights = np.arange(1, 201, dtype=np.float32).reshape(200, 1)
    weights[::2] = 0.0 if has_gaps else 0.5
    assert even_boxes(weights) is None
    total = np.random.default_rng(0).standard_normal((200, 5), np.float32)
    old = np.ones_like(total)
    expected = divided_by_entry(total, weights, old)
    divide(total, weights, old)
    assert np.array_equal(total, expected)


def test_a_scalar_is_one_box():
    total = np.array(6.0, np.float32)
    divide(total, np.array(2.0, np.float32), np.array(1.0, np.float32))
    assert total == 3.0
