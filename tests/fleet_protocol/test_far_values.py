"""Numbers that mark missing values are found with figures; honest columns have none."""

import numpy as np
import pytest
from pydantic import TypeAdapter
from sklearn import datasets

from fleet_protocol.data import DataConfig, load_data, make_dataset
from fleet_protocol.data.far_values import find_far_values
from fleet_protocol.data.inspection import inspect

DRAW = np.random.default_rng(0)
COUNT = 200
LABELS = DRAW.integers(0, 3, COUNT)


def marked(mark, lowest=10.0, highest=40.0):
    """Three columns in a range; every twentieth value of the second is a mark."""
    x = DRAW.uniform(lowest, highest, (COUNT, 3)).astype(np.float32)
    x[::20, 1] = mark
    return x


def sentences(x, y=LABELS):
    return [finding.text for finding in inspect(make_dataset("attic.csv", x, y))]


@pytest.mark.parametrize("mark", [-999, -9999, -127, 9999, 65535, -32768, 1e20, -5000])
def test_a_number_that_marks_missing_values_is_found(mark):
    """With its figures and what to do; the column is the only finding."""
    (text,) = sentences(marked(mark))
    assert text.startswith(f"column 1 is {mark:g} in 10 of 200 examined samples, and from 1")
    assert "set `missing` in [data]" in text


@pytest.mark.parametrize(
    ("mark", "lowest", "highest"),
    [(-999, 900, 1100), (99, 0, 30), (-127, -20, 60)],
)
def test_a_usual_mark_need_be_only_one_range_away(mark, lowest, highest):
    assert set(find_far_values(marked(mark, lowest, highest))) == {1}
    assert not find_far_values(marked(mark + 0.5, lowest, highest))


def test_two_marks_of_one_column_are_one_finding():
    x = marked(-999)
    x[5::20, 1] = 9999
    (text,) = sentences(x)
    assert "column 1 is -999 or 9999 in 20 of 200" in text


def test_a_mark_among_flags_and_in_targets():
    """A flag has two values, and a target of a regression is marked as well."""
    flags = (DRAW.random((COUNT, 3)) < 0.5).astype(np.float32)
    flags[::20, 1] = -9
    assert not sentences(flags)
    flags[::20, 1] = -99
    assert "column 1 is -99" in sentences(flags)[0]
    prices = DRAW.uniform(10, 20, COUNT).astype(np.float32)
    prices[::20] = -999
    (text,) = sentences(marked(20), prices)
    assert text.startswith("the target is -999 in 10 of 200")


@pytest.mark.parametrize("mark", [0, -1, 45, 200])
def test_what_may_be_a_value_is_not_found(mark):
    """0, values near the others, and an outlier that is not far enough."""
    assert sentences(marked(mark)) == []


def test_an_outlier_that_does_not_repeat_is_not_found():
    x = marked(20)
    x[3, 1] = -999
    assert sentences(x) == []


def test_a_number_that_the_user_chose_is_not_found(tmp_path):
    """`missing = -999` in [data] is a rule of the fleet."""
    lines = ["a,b,label"]
    for place, row in enumerate(marked(20)):
        gap = "" if place % 20 == 0 else f"{row[1]:.3f}"
        lines.append(f"{row[0]:.3f},{gap},{place % 3}")
    (tmp_path / "t.csv").write_text("\n".join(lines))
    table = {"kind": "csv", "path": "t.csv", "missing": -999}
    data = load_data(TypeAdapter(DataConfig).validate_python(table).resolved(tmp_path))
    assert data.x.min() == -999
    assert inspect(data) == ()


def test_whole_numbers_may_be_tokens():
    """Unless one is negative."""
    tokens = DRAW.integers(1, 50, (COUNT, 4))
    tokens[::20, 1] = 9999
    assert sentences(tokens) == []
    tokens[::20, 1] = -9999
    assert "column 1 is -9999" in sentences(tokens)[0]


@pytest.mark.parametrize("name", ["breast_cancer", "wine", "iris", "diabetes", "digits"])
def test_honest_boards_have_no_such_finding(name):
    """Boards with a tenth of the samples, with a single label, and with thirty samples."""
    data = getattr(datasets, f"load_{name}")()
    x = data.data.astype(np.float32)
    rows = np.arange(len(x))
    parts = [rows, *np.array_split(rows, 10), *np.array_split(rows, len(rows) // 30)]
    if name != "diabetes":
        for label in np.unique(data.target):
            parts.append(np.flatnonzero(data.target == label))
    for part in parts:
        found = inspect(make_dataset(name, x[part], data.target[part]))
        assert "missing" not in [finding.kind for finding in found]
