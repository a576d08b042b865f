"""What is in the wheel: our packages with the files they read, and nothing else."""

import zipfile

import pytest

from tests.packaging.conftest import ROOT

pytestmark = pytest.mark.slow
PACKAGES = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks"}


def test_the_wheel_has_every_package_file_and_no_test(wheel):
    """`models` is a hazardous top-level name and `tests` a worse one; data files are easily
    forgotten.
    """
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert {name.split("/")[0] for name in names} == PACKAGES
    ours = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert set(names) == ours
    for example in (
        "shoal/py.typed",
        "shoal/cli/demo.toml",
        "shoal/cli/report.html.j2",
        "shoal/cli/commands/up.py",
        "shoal/templates/vision/model.py.txt",
        "shoal/view/static/vendor/uPlot.LICENSE.txt",
    ):
        assert example in names
    assert any(name.startswith("broker_server/store/migrations/") for name in names)
    assert not any(name.startswith("shoal_cli") for name in names)
