"""Images that repeat are described; different ones, and rows of tables, are not."""

import numpy as np
import pytest

from fleet_protocol.data import make_dataset
from fleet_protocol.data.repeated import describe_repeated

DRAW = np.random.default_rng(0)
IMAGES = DRAW.integers(0, 256, (40, 1, 6, 6), dtype=np.uint8)


def described(x):
    return describe_repeated(make_dataset("img", x, np.arange(len(x)) % 2))


def test_a_picture_again_and_again():
    """All of a camera that hangs, or a tenth of them."""
    assert described(np.repeat(IMAGES[:1], 40, 0)).startswith("40 of 40 examined samples are the")
    some = IMAGES.copy()
    some[:4] = some[0]
    assert described(some).startswith("4 of 40 examined samples are the same")


def test_blank_pictures():
    """Of a camera that is covered."""
    blank = IMAGES.copy()
    blank[::4] = 255
    assert "10 of 40 examined samples have the value 255 everywhere" in described(blank)


@pytest.mark.parametrize(
    "x",
    [IMAGES, np.repeat(IMAGES[:1], 19, 0), np.repeat(IMAGES[:20], 2, 0), np.zeros((40, 5))],
    ids=["different", "few", "each twice", "a table"],
)
def test_samples_that_may_be_right(x):
    assert described(x) == ""
