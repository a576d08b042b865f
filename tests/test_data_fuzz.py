"""Damaged data files are refused by name: some of what `python -m tests.data_fuzz` does."""

import pytest

from fleet_protocol.data import readers
from tests import data_fuzz


@pytest.mark.parametrize("kind", data_fuzz.KINDS)
def test_damaged_files_are_read_or_refused_by_name(tmp_path, kind):
    """The same changes in every run."""
    readings = data_fuzz.fuzz(150, 60.0, 5, tmp_path, [kind])
    assert readings.refused[kind] + readings.read[kind] == 150
    assert readings.refused[kind] > 30


def test_an_error_without_a_name_is_seen(tmp_path, monkeypatch, capsys):
    """The script itself can fail."""

    def failing(_path, _bounds):
        raise ValueError("no name")

    grounds = data_fuzz.Ground(tmp_path / "whole", data_fuzz.KINDS["npy"])
    assert grounds.is_read(data_fuzz.KINDS["npy"].whole)
    monkeypatch.setattr(readers, "_load_numpy", failing)
    with pytest.raises(ValueError, match="no name"):
        grounds.is_read(data_fuzz.KINDS["npy"].whole)
