"""The house rules: who may import whom, and what a board must never load."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWED = {
    "fleet_protocol": set(),
    "models": {"fleet_protocol"},
    "device_runtime": {"fleet_protocol"},
    "broker_server": {"fleet_protocol", "models"},
    "trainer_export": {"fleet_protocol", "models"},
    "simulation": {"fleet_protocol", "models", "device_runtime", "broker_server", "trainer_export"},
    "shoal_cli": {"fleet_protocol", "models", "device_runtime", "broker_server", "trainer_export", "simulation"},
}
HEAVY = {"torch", "onnx", "onnxscript"}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found


@pytest.mark.parametrize("package", ALLOWED)
def test_arrows_point_downwards(package):
    """A package imports only itself and the packages below it, wherever in its files the import stands."""
    for path in (ROOT / package).rglob("*.py"):
        ours = {name.split(".")[0] for name in imports(path)} & set(ALLOWED)
        assert ours <= ALLOWED[package] | {package}, f"{path.relative_to(ROOT)} imports {ours}"


@pytest.mark.parametrize("package", ["fleet_protocol", "models", "device_runtime", "broker_server"])
def test_torch_lives_in_the_zoo_alone(package):
    """No file a board or the server loads names torch or onnx; models/zoo is the one exception."""
    for path in (ROOT / package).rglob("*.py"):
        if (ROOT / "models" / "zoo") not in path.parents:
            heavy = {name.split(".")[0] for name in imports(path)} & HEAVY
            assert not heavy, f"{path.relative_to(ROOT)} imports {heavy}"


@pytest.mark.parametrize(
    ("modules", "forbidden"),
    [
        (["device_runtime"], HEAVY | {"models", "broker_server", "trainer_export", "shoal_cli", "sqlalchemy"}),
        (["broker_server", "models"], HEAVY | {"trainer_export", "device_runtime", "shoal_cli"}),
    ],
)
def test_what_a_process_really_loads(modules, forbidden):
    """Importing every module of a package in a fresh process loads nothing heavy."""
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for top in modules
        for path in sorted((ROOT / top).rglob("*.py"))
        if "zoo" not in path.parts and path.name != "__main__.py"
    ]
    script = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
print(sorted({forbidden!r} & {{name.split(".")[0] for name in sys.modules}}))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


def test_wheel_holds_the_packages_and_not_the_tests():
    """`models` is a hazardous top-level name and `tests` a worse one: only our packages are listed for the wheel."""
    from setuptools import find_packages  # noqa: PLC0415  (a build tool, needed here alone)

    text = (ROOT / "pyproject.toml").read_text()
    listed = {package for package in ALLOWED if f'"{package}*"' in text}
    assert listed == set(ALLOWED)
    assert '"tests' not in text.split("[tool.setuptools.packages.find]")[1].split("[tool.setuptools.package-data]")[0]
    assert set(ALLOWED) <= set(find_packages(str(ROOT)))
