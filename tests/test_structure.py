"""The size and shape that the code keeps: no import circles, short modules, few arguments,
documented names.
"""

import ast
import re
import statistics
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "broker_server",
    "device_runtime",
    "fleet_protocol",
    "models",
    "reproduction",
    "shoal",
    "simulation",
    "trainer_export",
)
FOLDERS = (*PACKAGES, "benchmarks", "tools", "models/zoo", "trainer_export/lowering")
"""Folders whose modules are short, each by itself."""
COLUMNS = 100  # as ruff has them
MEDIAN_LINES = 150
MOST_LINES = 400
MANY_ARGUMENTS = 5
SHARE_WITH_MANY = 0.03
SHARE_DOCUMENTED = 0.98

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the product by its dotted name."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
            path.read_text()
        )
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def lengths(folder: str) -> dict[str, int]:
    """Lines of each module of a folder, but for the one-line docstrings of packages."""
    counted = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        lines = len(path.read_text().splitlines())
        if lines > 3:
            counted[str(path.relative_to(ROOT))] = lines
    return counted


def imported(tree: ast.Module) -> set[str]:
    """Modules of the product that a module imports, wherever in it the import stands."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules() else node.module for name in inner}
    return found & modules().keys()


def functions() -> Iterator[tuple[str, Function]]:
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, Function):
                yield f"{name}.{node.name}", node


def arguments(node: Function) -> int:
    named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return sum(item.arg not in {"self", "cls"} for item in named)


def public(body: list[ast.stmt]) -> Iterator[Function]:
    for node in body:
        if isinstance(node, Function) and not node.name.startswith("_"):
            yield node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public(node.body)


def test_no_module_imports_itself_by_a_detour():
    """There is an order in which every module comes after all that it imports, inside functions,
    too.
    """
    graph = {name: imported(tree) - {name} for name, tree in modules().items()}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        circle = error.args[1]
        raise AssertionError(" <- ".join(circle)) from None


def test_a_circle_would_be_found():
    """The search sees circles: with one arrow turned round there is one."""
    graph = {name: imported(tree) - {name} for name, tree in modules().items()}
    upper = next(name for name, below in graph.items() if below)
    lower = next(iter(graph[upper]))
    graph[lower] = graph[lower] | {upper}
    with pytest.raises(CycleError):
        tuple(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("folder", FOLDERS)
def test_modules_are_short(folder):
    """One idea per file, in every folder."""
    counted = lengths(folder)
    assert {name: lines for name, lines in counted.items() if lines > MOST_LINES} == {}
    assert statistics.median(counted.values()) <= MEDIAN_LINES


def test_few_functions_take_many_arguments():
    """What travels together is a value."""
    many = [
        f"{name} ({arguments(node)})"
        for name, node in functions()
        if arguments(node) > MANY_ARGUMENTS
    ]
    assert len(many) <= SHARE_WITH_MANY * sum(1 for _ in functions()), "\n".join(many)


def test_exceptions_from_limits_of_size_have_a_reason():
    """Each says in its line why a function may have more arguments or branches than others."""
    exceptions = 0
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for line in path.read_text().splitlines():
                if re.search(r"noqa:.*(C901|PLR09|PLR17)", line):
                    exceptions += 1
                    assert re.search(r"noqa: [A-Z0-9, ]+  \(\w.*\w\)$", line), f"{path}: {line}"
    assert exceptions > 10


def test_public_functions_are_documented():
    """Functions and methods that others may call say what they do."""
    found = [node for tree in modules().values() for node in public(tree.body)]
    assert sum(ast.get_docstring(node) is not None for node in found) >= SHARE_DOCUMENTED * len(
        found
    )


def test_lines_of_the_page_are_short():
    """The formatter keeps Python's lines short; nothing else keeps those of scripts and styles."""
    static = ROOT / "shoal" / "view" / "static"
    long = []
    for path in sorted(static.glob("*.*")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if len(line) > COLUMNS:
                long.append(f"{path.name}:{number}")
    assert long == []
