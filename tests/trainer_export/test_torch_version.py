"""The range of PyTorch that the exporter supports is that of pyproject.toml, and is checked."""

from pathlib import Path

import pytest

from fleet_protocol.errors import ConfigError
from trainer_export import torch_version
from trainer_export.torch_version import FIRST, LAST, require_known_torch

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_the_range_is_that_of_the_project():
    text = f"torch>={FIRST[0]}.{FIRST[1]},<{LAST[0]}.{LAST[1] + 1}"
    assert PROJECT.read_text().count(f'"{text}"') == 2
    assert LAST[1] - FIRST[1] >= 2  # three minor releases


@pytest.mark.parametrize("installed", ["2.11.0", "2.13.0", "2.13.1+cpu"])
def test_a_release_of_the_range_is_taken(monkeypatch, installed):
    monkeypatch.setattr(torch_version, "version", lambda _: installed)
    require_known_torch()


@pytest.mark.parametrize("installed", ["2.10.1", "2.14.0", "1.13.0", "3.0.0a1"])
def test_another_release_is_refused_by_name(monkeypatch, installed):
    monkeypatch.setattr(torch_version, "version", lambda _: installed)
    with pytest.raises(ConfigError, match=rf"torch {installed} .*torch 2\.11 to 2\.13"):
        require_known_torch()
