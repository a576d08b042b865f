"""Figures of samples as a model sees them, held against numpy over all values at once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fleet_protocol.data import make_dataset
from fleet_protocol.data.summary import MOST_ROWS, DataSummary, drawn_rows, summarise
from fleet_protocol.errors import DataError

SHAPES = st.one_of(
    st.tuples(st.integers(1, 30), st.integers(1, 5)),
    st.tuples(st.integers(1, 8), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.integers(1, 30)),
)
VALUES = st.floats(-(2.0**40), 2.0**40, width=32)


def labels(count):
    return np.zeros(count, np.int64)


def data_of(x, **settings):
    return make_dataset("board.npz", x, labels(len(x)), **settings)


def groups_of(x):
    """Values ``[rows, groups, values]``, as a reader of the documents would group them."""
    return x.reshape(len(x), 1, 1) if x.ndim == 1 else x.reshape(len(x), x.shape[1], -1)


@given(x=SHAPES.flatmap(lambda shape: arrays.arrays(np.float32, shape, elements=VALUES)))
def test_figures_are_those_of_numpy(x):
    """Lowest, highest, mean and deviation of each column or channel, with six digits."""
    summary = summarise(data_of(x))
    wide = groups_of(x.astype(np.float64))
    size = float(np.abs(wide).max()) or 1.0
    assert summary.rows == summary.drawn == len(x)
    np.testing.assert_allclose(summary.lowest, wide.min((0, 2)), rtol=1e-5)
    np.testing.assert_allclose(summary.highest, wide.max((0, 2)), rtol=1e-5)
    np.testing.assert_allclose(summary.mean, wide.mean((0, 2)), rtol=1e-5, atol=1e-12 * size)
    np.testing.assert_allclose(summary.deviation, wide.std((0, 2)), rtol=1e-5, atol=1e-12 * size)
    assert DataSummary.model_validate_json(summary.to_bytes()) == summary


@given(
    x=st.integers(1, 40).flatmap(lambda n: arrays.arrays(np.uint8, (n, 2, 3, 3))),
    scale=st.sampled_from([1.0, 1 / 255, 3.5]),
    mean=st.sampled_from([0.0, 0.5, (0.25, -2.0)]),
    std=st.sampled_from([1.0, 0.25, (2.0, 0.5)]),
)
def test_figures_are_of_what_a_model_sees(x, scale, mean, std):
    """Scale, mean and std of the data are in them; they are those of the batches."""
    data = data_of(x, scale=scale, mean=mean, std=std)
    seen = groups_of(data.batch(slice(None), "float32")[0].astype(np.float64))
    summary = summarise(data)
    np.testing.assert_allclose(summary.lowest, seen.min((0, 2)), rtol=1e-5)
    np.testing.assert_allclose(summary.highest, seen.max((0, 2)), rtol=1e-5)
    np.testing.assert_allclose(summary.mean, seen.mean((0, 2)), rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(summary.deviation, seen.std((0, 2)), rtol=1e-5, atol=1e-9)


@given(tokens=arrays.arrays(np.int64, (7, 5), elements=st.integers(0, 2**53)))
def test_tokens_are_exact_and_not_scaled(tokens):
    """The highest token is the highest token, whatever float32 or a scale would make of it."""
    summary = summarise(data_of(tokens, scale=0.5), tokens=True)
    assert max(summary.highest) == tokens.max()
    assert min(summary.lowest) == tokens.min()
    assert max(summarise(data_of(tokens)).highest) == tokens.max()
    assert summary.whole


def test_small_spread_far_from_zero_is_not_lost():
    """A deviation of 0.5 at a mean of 10 million, over many pieces, which sums of squares would
    lose.
    """
    x = 1e7 + np.random.default_rng(1).integers(0, 2, (9_000, 200)).astype(np.float32)
    summary = summarise(data_of(x))
    np.testing.assert_allclose(summary.deviation, x.astype(np.float64).std(0), rtol=1e-5)


def test_what_the_figures_are_of():
    """Columns of flat samples, channels of images, and all values where there are too many of
    either.
    """
    assert summarise(data_of(np.zeros((3, 256)))).groups == "columns"
    assert len(summarise(data_of(np.zeros((3, 256)))).mean) == 256
    assert summarise(data_of(np.zeros((3, 257)))).groups == "all"
    assert len(summarise(data_of(np.zeros((3, 257)))).mean) == 1
    assert summarise(data_of(np.zeros((3, 4, 300)))).groups == "channels"
    assert summarise(data_of(np.zeros(3))).groups == "all"


def test_whole_numbers_are_told_from_fractions():
    """Of what a model sees: pixels that are scaled are whole no longer."""
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 4)
    assert summarise(data_of(pixels)).whole
    assert not summarise(data_of(pixels, scale=1 / 255)).whole
    assert summarise(data_of(pixels.astype(np.float64))).whole


@given(count=st.integers(1, 100_000), most=st.integers(1, 3_000))
def test_rows_are_drawn_evenly(count, most):
    """All of few; of many one from each stretch, each once and in order."""
    rows = drawn_rows(count, most)
    assert len(rows) == min(count, most)
    stretch = count / len(rows)
    ideal = np.arange(len(rows)) * stretch
    assert (rows >= np.floor(ideal)).all()
    assert (rows < np.ceil(ideal + stretch)).all()
    assert (np.diff(rows) > 0).all()


def test_much_data_is_drawn_from():
    """A million samples, in which labels take turns, cost ten thousand; every label is met equally
    often.
    """
    x = np.tile(np.arange(10, dtype=np.uint8), 100_000)[:, None]
    summary = summarise(data_of(x))
    assert (summary.rows, summary.drawn) == (1_000_000, MOST_ROWS)
    assert summary.mean[0] == pytest.approx(4.5, abs=0.1)


def test_large_samples_are_fewer():
    """Sixteen samples of a million values each are what is looked at."""
    x = np.broadcast_to(np.uint8(7), (40, 1, 1024, 1024))
    summary = summarise(data_of(x))
    assert (summary.drawn, summary.mean) == (16, (7.0,))


def test_a_scale_that_leaves_float32_stays_finite():
    """So that the summary can be written."""
    summary = summarise(data_of(np.array([[1e30], [-1e30]]), scale=1e30))
    assert summary.highest[0] == pytest.approx(3.40282e38)
    assert DataSummary.model_validate_json(summary.to_bytes()) == summary


def test_samples_without_a_value_are_refused():
    """By name."""
    with pytest.raises(
        DataError, match=r"samples in board.npz have shape \[0\], which holds no values"
    ):
        data_of(np.zeros((3, 0)))
