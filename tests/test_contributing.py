"""The worked examples of CONTRIBUTING.md: each is applied to a copy of the tree, checked, and
passes its own test.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.marking import mostly_slow

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
STEP = re.compile(
    r"^(New file|In) \*\*([\w/.]+)\*\*.*?\n```(?:python|diff)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
PRODUCT_FILES = {
    "A strategy": 1,
    "A routine": 2,
    "An operator": 1,
    "A loss": 1,
    "A screen": 3,
    "An encoding": 3,
    "An optimizer": 1,
    "A board sensor": 2,
    "A transport": 2,
}
"""How many files of the product an addition may touch."""


def examples() -> dict[str, str]:
    parts = re.split(r"(?m)^### (.*)$", TEXT[TEXT.index("## Worked examples") :])
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def copy_of_the_tree(folder: Path) -> Path:
    packages = [path.parent for path in ROOT.glob("*/__init__.py")]
    for package in packages:
        shutil.copytree(
            package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__", "docs")
        )
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def edited(text: str, diff: str) -> str:
    """A change by its lines: those of ``-`` and of context must be there once, those of ``+`` come
    instead.
    """
    lines = diff.splitlines(keepends=True)
    old = "".join(line[1:] for line in lines if not line.startswith("+"))
    new = "".join(line[1:] for line in lines if not line.startswith("-"))
    assert text.count(old) == 1, f"these lines should be there once:\n{old}"
    return text.replace(old, new)


def apply(example: str, tree: Path) -> list[str]:
    """The files that an example makes or changes, in its order."""
    touched: list[str] = []
    for kind, name, body in STEP.findall(example):
        file = tree / name
        if kind == "New file":
            assert not file.exists(), f"{name} is there already"
            file.write_text(body)
        else:
            file.write_text(edited(file.read_text(), body))
        touched.append(name)
    return list(dict.fromkeys(touched))


@pytest.mark.parametrize("title", examples())
def test_an_example_applies(title, tmp_path):
    """What it changes is in the tree once, it brings one test, and no more of the product is
    touched.
    """
    touched = apply(examples()[title], copy_of_the_tree(tmp_path))
    tests = [name for name in touched if name.startswith("tests/")]
    assert len(tests) == 1
    assert len(touched) - len(tests) == PRODUCT_FILES[title]


def run_in(tree: Path, module: list[str], environment: Mapping[str, str]) -> None:
    """Run a module of Python in a copy of the tree, which must end with 0."""
    ended = subprocess.run(
        [sys.executable, "-m", *module],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, f"{' '.join(module)}\n{ended.stdout}{ended.stderr}"


@pytest.mark.parametrize("title", examples())
def test_ruff_accepts_an_example(title, tmp_path):
    """Its files have the form and pass the rules of the tree."""
    tree = copy_of_the_tree(tmp_path)
    touched = apply(examples()[title], tree)
    run_in(tree, ["ruff", "format", "--check", "--no-cache", *touched], os.environ)
    run_in(tree, ["ruff", "check", "--no-cache", *touched], os.environ)


@pytest.mark.parametrize(
    "title", mostly_slow(examples(), lambda title: title in {"A strategy", "A transport"})
)
def test_an_example_works_as_it_stands(title, tmp_path):
    """The example's test passes."""
    tree = copy_of_the_tree(tmp_path)
    touched = apply(examples()[title], tree)
    tests = [name for name in touched if name.startswith("tests/")]
    ours = {
        name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")
    }  # not of the copy
    environment = {**ours, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    run_in(tree, ["pytest", "-q", "-p", "no:cacheprovider", *tests], environment)
