"""What training costs on a board: measured by the way of a task, on what every board has or what
was exported.
"""

import shutil

import pytest

from device_runtime.bench import SMALL, board_line, costs
from device_runtime.board import installed_backends
from fleet_protocol.errors import ConfigError


def test_the_set_that_every_board_has_is_measured():
    """Its samples are always the same, so its loss is, too; quartiles stand around the median."""
    (first,), (second,) = costs(SMALL, 10), costs(SMALL, 10)
    assert (first.arch, first.tier, first.batch) == ("tiny", "w1.00-d1", 10)
    assert first.loss == second.loss
    assert 0 < first.step_low_ms <= first.step_ms <= first.step_high_ms
    assert 0 < first.opens_ms / 1e3 < first.first_step_seconds
    assert first.opens_again_ms > 0
    assert first.peak_mb > 10


def test_a_board_says_what_it_is():
    line = board_line()
    assert installed_backends()["onnx"] in line
    assert "GiB" in line


def test_every_set_of_a_folder_is_measured(tmp_path):
    for name in ("one", "two/three"):
        shutil.copytree(SMALL, tmp_path / name)
    assert [cost.arch for cost in costs(tmp_path, 2)] == ["tiny", "tiny"]


def test_a_folder_without_sets_says_where_they_come_from(tmp_path):
    with pytest.raises(ConfigError, match=r"contains no artifact set: `shoal export` writes them"):
        next(costs(tmp_path, 10))


def test_a_set_that_cannot_be_trained_is_named_with_the_reason(tmp_path):
    """A graph that is not the manifest's is not run here either."""
    shutil.copytree(SMALL, tmp_path / "set")
    (tmp_path / "set" / "train.onnx").write_bytes(b"something else")
    with pytest.raises(
        ConfigError, match=r"set.manifest\.json: cannot be trained here: .*is not in the manifest"
    ):
        next(costs(tmp_path, 10))
