"""Matthews' correlation, against the correlation coefficient of the predictions."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulation.judges import matthews
from simulation.results.history import read_history, write_history
from simulation.results.rounds import RoundRow


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=30))
@settings(max_examples=100)
def test_it_is_the_correlation_of_two_binary_variables(pairs):
    """Pearson's coefficient of labels and predictions, 0 where one of them does not vary."""
    labels, guesses = np.array(pairs, float).T
    present = (int((labels == 0).sum()), int((labels == 1).sum()))
    found = tuple(int(((labels == label) & (guesses == label)).sum()) for label in (0, 1))
    expected = (
        0.0 if labels.std() == 0 or guesses.std() == 0 else np.corrcoef(labels, guesses)[0, 1]
    )
    assert matthews((found[0], found[1]), present) == pytest.approx(expected, abs=1e-12)


def test_the_more_frequent_label_alone_is_worth_nothing():
    """CoLA's 70 % of acceptable sentences make an accuracy of 0.7 and a correlation of 0."""
    assert matthews((0, 70), (30, 70)) == 0.0
    assert matthews((30, 70), (30, 70)) == 1.0
    assert matthews((0, 0), (30, 70)) == -1.0


def test_histories_without_the_column_can_be_read(tmp_path):
    """A run that was begun before the column came goes on."""
    import pyarrow as pa  # noqa: PLC0415
    from pyarrow import parquet  # noqa: PLC0415

    row = RoundRow(1, 1, 0.5, 0.7, 0.6, 3, {"w1.00-d1": 3}, 1.0, 1.0, 2.0, 10, None)
    write_history(tmp_path, [row])
    path = tmp_path / "metrics.parquet"
    with parquet.ParquetFile(path) as file:
        table = file.read()
    parquet.write_table(table.drop_columns(["matthews"]), path)
    assert read_history(tmp_path) == (row,)
    write_history(tmp_path, [dataclasses.replace(row, matthews=0.25)])
    assert read_history(tmp_path)[0].matthews == 0.25
    assert isinstance(table, pa.Table)
