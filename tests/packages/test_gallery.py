"""Models of packages are exported by their SPEC, and compute what the packages' own classes do."""

import json
import subprocess
import sys

import pytest

from tests.packages.gallery import GALLERY, Packaged
from tests.packages.table import PAGE, stored_rows, table, with_table

_PATIENCE = 900  # seconds for one model
_DISCOVERY_SECONDS = 15
_TOLERANCE = 1e-4  # of the largest value
# Batch norms over the three samples of a step multiply rounding, by how much depends on the
# processor: 1.2e-4 was measured for ShuffleNetV2.
_STEP_TOLERANCE = 3e-4


def test_the_table_is_that_of_the_stored_run() -> None:
    """The page has what was measured, of models of the gallery, and none deviates."""
    assert with_table(PAGE.read_text()) == PAGE.read_text()
    assert table() in PAGE.read_text()
    for row in stored_rows():
        assert row["deviation of outputs"] < _TOLERANCE, row
        assert (row["deviation of a step"] or 0) < _STEP_TOLERANCE, row


def test_every_model_has_a_title_and_a_measurement() -> None:
    """The title selects a model, and its stored measurement."""
    titles = [entry.title for entry in GALLERY]
    assert len({*titles}) == len(titles)
    assert [row["model"] for row in stored_rows()] == titles


@pytest.mark.packages
@pytest.mark.parametrize("packaged", GALLERY, ids=[entry.title for entry in GALLERY])
def test_a_model_is_exported_by_its_name(packaged: Packaged) -> None:
    """Its axes are found, a slice is the package's smaller model, and a step is autograd's."""
    pytest.importorskip(packaged.package)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.packages.oracle", packaged.title],
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["deviation of outputs"] < _TOLERANCE
    assert (row["deviation of a step"] or 0) < _STEP_TOLERANCE
    assert row["discovery seconds"] < 2 * _DISCOVERY_SECONDS
