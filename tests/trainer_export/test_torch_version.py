"""The range of PyTorch that the exporter supports is that of pyproject.toml, and is checked."""

from importlib.metadata import version
from pathlib import Path

import pytest

from fleet_protocol.errors import ConfigError
from trainer_export import torch_version
from trainer_export.torch_version import DEFAULT, FIRST, LAST, TESTED, require_known_torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed(monkeypatch):
    """Pretend that a release of PyTorch is installed."""
    torch_version._warn.cache_clear()
    yield lambda release: monkeypatch.setattr(torch_version, "version", lambda _: release)
    torch_version._warn.cache_clear()


def test_the_range_is_that_of_the_project():
    """It covers three minor releases from the one that the tests run with; that one is tested."""
    text = f"torch>={FIRST[0]}.{FIRST[1]},<{LAST[0]}.{LAST[1] + 1}"
    assert (ROOT / "pyproject.toml").read_text().count(f'"{text}"') == 2
    assert LAST[1] - DEFAULT[1] >= 2
    assert DEFAULT in TESTED
    default = f"{DEFAULT[0]}.{DEFAULT[1]}."
    assert version("torch").startswith(default)
    assert f"torch=={default}" in (ROOT / "constraints.txt").read_text()


@pytest.mark.parametrize("release", ["2.13.0", "2.13.1+cpu", "2.14.1+cu130"])
def test_the_tested_release_is_taken_in_silence(installed, caplog, release):
    installed(release)
    require_known_torch()
    assert not caplog.messages


@pytest.mark.parametrize("release", ["2.11.0", "2.12.1", "2.15.0+cu130"])
def test_an_untested_release_of_the_range_is_named_once(installed, caplog, release):
    installed(release)
    require_known_torch()
    require_known_torch()
    (line,) = caplog.messages
    assert line.startswith(
        f"torch {release} is installed, but Shoal was tested only with torch 2.13 and 2.14"
    )
    assert line.endswith("pip install 'torch==2.13.*'")


@pytest.mark.parametrize("release", ["2.10.1", "2.16.0", "1.13.0", "3.0.0a1"])
def test_another_release_is_refused_by_name(installed, release):
    installed(release)
    with pytest.raises(ConfigError, match=rf"torch {release} .*torch 2\.11 to 2\.15: pip install"):
        require_known_torch()
