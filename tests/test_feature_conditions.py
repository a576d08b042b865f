"""Coordinator, agent and exporter have no conditions on single features of training.

Private parts, trained shares with their windows, exits and FedDyn's memory are values with traits:
a strategy, a routine, a plan, a loss.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORDS = {
    "private",
    "copy_model",
    "private_epochs",
    "adapt_epochs",
    "stays",
    "trained",
    "place",
    "window",
    "windows",
    "exits",
    "feddyn",
    "memories",
}
FOLDERS = {
    "coordinator": ("broker_server/rounds",),
    "agent": ("device_runtime/agent",),
    "exporter": ("trainer_export",),
}


def conditions(tree: ast.AST) -> Iterator[ast.expr]:
    """Whatever decides which code of a module runs."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.Match):
            yield node.subject


def asked_in(source: str) -> list[str]:
    """The conditions of a module on an attribute that belongs to a feature."""
    found: list[str] = []
    for condition in conditions(ast.parse(source)):
        names = {node.attr for node in ast.walk(condition) if isinstance(node, ast.Attribute)}
        if names & WORDS:
            found.append(ast.unparse(condition))
    return found


@pytest.mark.parametrize("part", FOLDERS)
def test_no_condition_asks_for_a_feature(part):
    paths = [path for folder in FOLDERS[part] for path in (ROOT / folder).rglob("*.py")]
    own = ("trainer_export/losses", "trainer_export/packages")
    read = [path for path in paths if not path.relative_to(ROOT).as_posix().startswith(own)]
    assert len(read) > 10
    found = {path.name: asked_in(path.read_text()) for path in read}
    assert not {name: texts for name, texts in found.items() if texts}


def test_a_condition_is_found():
    source = "kept = [t for t in tiers if t.place == 0]\nif config.private is not None: pass"
    assert asked_in(source) == ["config.private is not None", "t.place == 0"]
