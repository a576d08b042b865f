"""Labels that are numbered from 1, or with large gaps, are described with figures."""

import numpy as np
import pytest

from fleet_protocol.data.unused_labels import describe_unused
from fleet_protocol.errors import DataError
from fleet_protocol.targets import check_labels


def test_labels_from_one():
    """Ten labels from 1 to 10 make eleven outputs, of which one is never trained."""
    y = np.arange(100) % 10 + 1
    text = describe_unused("test.npz", y, 11)
    assert text.startswith(
        "the labels in test.npz are 10 different numbers from 1 to 10, and the model has 11 labels "
        "from 0 to 10, so no sample has the label 0: "
    )
    assert "subtract 1" in text


@pytest.mark.parametrize("y", [[0, 1000, 2000], [1200, 3400, 5600, 3400], [10, 20, 30]])
def test_labels_with_large_gaps(y):
    """Numbers of articles, prices, or tens."""
    text = describe_unused("test.npz", np.array(y), max(y) + 1)
    assert "number the labels 0, 1, 2, ... without gaps" in text


@pytest.mark.parametrize(
    ("y", "classes"),
    [
        ([0, 1, 2, 3], 4),
        ([0, 1, 3], 4),  # a rare label
        ([1, 2, 3], 10),  # a model with more labels, of which the test set has some
        ([0, 2, 5, 9], 20),
        ([3, 3, 3], 4),  # a board with a single label
        ([-1, 0, 1], 2),
    ],
)
def test_labels_that_may_be_right(y, classes):
    assert describe_unused("test.npz", np.array(y), classes) == ""


def test_numbers_and_labels_of_tokens_are_not_examined():
    assert describe_unused("x", np.array([1.5, 900.0]), 901) == ""
    assert describe_unused("x", np.array([[1, 900], [5, 900]]), 901) == ""


def test_a_board_that_counts_from_one_gets_the_remedy():
    with pytest.raises(DataError, match=r"outside 0 to 9 \(2 such labels\); labels count from 0"):
        check_labels("attic.npz", np.array([*range(1, 11), 10]), 10)
    with pytest.raises(DataError, match=r"\(1 such labels\)$"):
        check_labels("attic.npz", np.array([0, 10]), 10)
