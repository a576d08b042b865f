"""The extras as pyproject.toml states them: one runtime in each, and no way to have both."""

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.packaging.conftest import pip

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
TWINS = [name for name in EXTRAS if f"{name}-training" in EXTRAS]
STOCK = {"onnxruntime", "flatbuffers"}
TRAINING = {"onnxruntime-training-cpu", "flatbuffers"}


def requirements(extra):
    """What an extra needs beside Shoal itself, with what the extras need that it names."""
    found = {}
    for item in map(Requirement, EXTRAS[extra]):
        for name in item.extras if item.name == "shoal" else ():
            found |= requirements(name)
        if item.name != "shoal":
            found[item.name] = str(item.specifier)
    return found


@pytest.mark.parametrize("extra", TWINS)
def test_twins_differ_in_the_runtime_alone(extra):
    """What is said of an extra holds for its twin, except for what onnxruntime-training adds."""
    stock = requirements(extra)
    training = requirements(f"{extra}-training")
    assert {name: spec for name, spec in stock.items() if name not in STOCK} == {
        name: spec for name, spec in training.items() if name not in TRAINING
    }
    assert set(stock) >= STOCK
    assert set(training) >= TRAINING
    assert "onnxruntime" not in training
    assert "onnxruntime-training-cpu" not in stock


def test_each_of_the_four_kinds_has_a_twin():
    """So that none of them drags the other runtime in."""
    assert set(TWINS) == {"device", "server", "export", "simulate", "demo"}
    for extra in EXTRAS:
        runs = {"onnxruntime", "onnxruntime-training-cpu"} & set(requirements(extra))
        assert len(runs) == (1 if extra.removesuffix("-training") in TWINS else 0), extra


def test_every_message_that_names_an_extra_names_one_that_there_is():
    """`pip install 'shoal[...]'` as an error prints it can be typed."""
    code = "\n".join(
        path.read_text() for package in ("shoal", "models", "broker_server", "device_runtime", "fleet_protocol",
        "simulation", "trainer_export", "reproduction") for path in (ROOT / package).rglob("*.py")
    )  # fmt: skip
    text = code + (ROOT / "docs" / "install.md").read_text()
    named = {name for part in re.findall(r"shoal\[([a-z,-]+)\]", text) for name in part.split(",")}
    named |= set(re.findall(r"needs\(\"([a-z-]+)\"\)", code))
    assert len(named) > 8
    assert named <= set(EXTRAS)


@pytest.mark.slow
@pytest.mark.skipif(
    sys.version_info >= (3, 13), reason="onnxruntime-training has no wheel for this Python"
)
@pytest.mark.parametrize(
    ("stock", "training"), [("device", "server-training"), ("server", "device-training")]
)
def test_pip_refuses_both_runtimes(wheel, stock, training):
    """Asked for an extra of either kind, pip finds no solution, where it would have mixed two
    packages.
    """
    alone = pip("install", "--dry-run", "--quiet", "--ignore-installed", f"{wheel}[{training}]")
    assert alone.returncode == 0, alone.stderr
    both = pip(
        "install", "--dry-run", "--quiet", "--ignore-installed", f"{wheel}[{stock},{training}]"
    )
    assert both.returncode == 1
    assert "conflicting dependencies" in both.stderr
