"""The layers of the code: which package may import which, and what a board must never load."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
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
}
ALLOWED["reproduction"] = {*ALLOWED, "simulation"}
ALLOWED["shoal"] = {*ALLOWED, "reproduction"}
LAYERS = {
    "broker_server": (
        "strategies",
        "stages",
        "settings",
        "store",
        "updates",
        "rounds",
        "service",
    )
}
"""The subpackages of a package from the lowest layer to the highest: each imports only itself and
those before it.
"""
MQTT = {
    "fleet_protocol.lean_client",
    "fleet_protocol.link",
    "fleet_protocol.topics",
    "fleet_protocol.transport",
    "paho",
}
FORBIDDEN = {
    "broker_server.strategies": MQTT,
    "broker_server.stages": MQTT,
    "broker_server.settings": MQTT,
    "broker_server.store": MQTT,
    "broker_server.updates": MQTT,
    "broker_server.rounds": MQTT,
    "simulation": {"broker_server.service"},
    "reproduction": {"broker_server.service"},
}
"""What a package must not import although it is below; in the server only `service` knows MQTT."""
FRONTS = ("cli", "view", "flash", "bench")
"""Packages of `shoal` for one use each. They share the modules below `shoal`; only the command line
calls the others.
"""
HEAVY = {"torch", "onnx", "onnxscript"}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    """What a file imports, wherever in it the import stands; of ``from a import b`` that is
    ``a.b``.
    """
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    return imported


def is_within(name: str, package: str) -> bool:
    """Return whether a name is a package or module, or something in it."""
    return name == package or name.startswith(f"{package}.")


@pytest.mark.parametrize("package", ALLOWED)
def test_arrows_point_downwards(package):
    """A package imports only itself and the packages below it, wherever in its files the import
    stands.
    """
    for path in (ROOT / package).rglob("*.py"):
        ours = {name.split(".")[0] for name in imports(path)} & set(ALLOWED)
        assert ours <= ALLOWED[package] | {package}, f"{path.relative_to(ROOT)} imports {ours}"


@pytest.mark.parametrize(
    ("package", "layer"), [(package, layer) for package in LAYERS for layer in LAYERS[package]]
)
def test_layers_import_only_what_is_below_them(package, layer):
    """A subpackage imports none in a layer above its own."""
    layers = LAYERS[package]
    above = [f"{package}.{name}" for name in layers[layers.index(layer) + 1 :]]
    for path in (ROOT / package / layer).rglob("*.py"):
        wrong = {name for name in imports(path) if any(is_within(name, upper) for upper in above)}
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


@pytest.mark.parametrize("package", LAYERS)
def test_every_file_has_a_layer(package):
    """Beside its layers a package has no modules, and no subpackage that the table forgot."""
    folder = ROOT / package
    folders = {
        path.name for path in folder.iterdir() if path.is_dir() and path.name != "__pycache__"
    }
    assert folders == set(LAYERS[package])
    assert {path.name for path in folder.glob("*.py")} == {"__init__.py"}


@pytest.mark.parametrize("front", [front for front in FRONTS if front != "cli"])
def test_fronts_do_not_import_each_other(front):
    """The page, flashing and benchmarks import neither each other nor the command line."""
    other_fronts = [f"shoal.{front_name}" for front_name in FRONTS if front_name != front]
    for path in (ROOT / "shoal" / front).rglob("*.py"):
        wrong = {
            name
            for name in imports(path)
            if any(is_within(name, front_name) for front_name in other_fronts)
        }
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_what_fronts_share_knows_none_of_them():
    """The modules directly below `shoal` import no front, but for the start of the command line."""
    fronts = [f"shoal.{front}" for front in FRONTS]
    for path in (ROOT / "shoal").glob("*.py"):
        if path.name == "__main__.py":
            continue
        wrong = {name for name in imports(path) if any(is_within(name, front) for front in fronts)}
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


@pytest.mark.parametrize("package", FORBIDDEN)
def test_some_packages_below_are_forbidden(package):
    """A package does not import what the table forbids it, although it lies below."""
    for path in ROOT.joinpath(*package.split(".")).rglob("*.py"):
        wrong = {
            name
            for name in imports(path)
            if any(is_within(name, forbidden) for forbidden in FORBIDDEN[package])
        }
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_no_circles():
    """No module imports itself by way of others, not even inside functions."""
    files = {
        module_name(path): path for package in ALLOWED for path in (ROOT / package).rglob("*.py")
    }
    graph = {
        name: {
            imported if imported in files else imported.rpartition(".")[0]
            for imported in imports(path)
        }
        - {name}
        for name, path in files.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imports in a circle: {' -> '.join(reversed(error.args[1]))}")


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
        (
            ["device_runtime"],
            HEAVY | {"models", "broker_server", "trainer_export", "shoal", "sqlalchemy"},
        ),
        (["broker_server", "models"], HEAVY | {"trainer_export", "device_runtime", "shoal"}),
    ],
)
def test_what_a_process_really_loads(modules, forbidden):
    """Importing every module of a package in a fresh process loads nothing heavy."""
    names = [
        module_name(path)
        for top in modules
        for path in sorted((ROOT / top).rglob("*.py"))
        if "zoo" not in path.parts
        and path.name not in {"__main__.py", "env.py"}  # env.py is Alembic's script
    ]
    assert not loaded_by(names) & forbidden


def test_a_worker_of_a_simulation_starts_without_the_exporter():
    """There is one for each core, and devices that train as boards do need neither torch nor what
    writes the graphs.
    """
    assert not loaded_by(["simulation.worker"]) & (
        HEAVY | {"trainer_export", "sqlalchemy", "sklearn", "matplotlib"}
    )


def loaded_by(names):
    """The packages that are loaded once a fresh process has imported some modules."""
    script = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
print(*{{name.split(".")[0] for name in sys.modules}})
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=ROOT,
    )
    return set(done.stdout.split())


def test_wheel_holds_the_packages_and_not_the_tests():
    """`models` is a hazardous top-level name and `tests` a worse one: only our packages are listed
    for the wheel.
    """
    from setuptools import find_packages  # noqa: PLC0415  (a build tool, needed here alone)

    text = (ROOT / "pyproject.toml").read_text()
    listed = {package for package in ALLOWED if f'"{package}*"' in text}
    assert listed == set(ALLOWED)
    assert (
        '"tests'
        not in text.split("[tool.setuptools.packages.find]")[1].split(
            "[tool.setuptools.package-data]"
        )[0]
    )
    assert set(ALLOWED) <= set(find_packages(str(ROOT)))
