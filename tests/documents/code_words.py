"""The words that a person reads in code: docstrings, messages and comments.

`python -m tests.documents.code_words PACKAGE` lists the sentences that break a rule.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.documents.plain import ROOT, Fault, faults

__all__ = ["DONE", "code_faults", "texts"]

DONE = (
    "benchmarks",
    "broker_server",
    "device_runtime",
    "fleet_protocol",
    "models",
    "reproduction",
    "shoal",
    "simulation",
    "trainer_export",
)
"""Packages, or modules of them, that contain no such sentence."""


def code_faults(path: Path) -> list[tuple[int, Fault]]:
    """Every sentence of a module that breaks a rule, with the line where its text begins."""
    found = []
    for line, text in texts(path.read_text()):
        for fault in faults(text):
            found.append((line, fault))
    return found


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Docstrings, string constants of several words, and comments, with their first lines."""
    yield from _strings(ast.parse(source))
    yield from _comments(source)


def _strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    parts = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts.update(id(value) for value in node.values)
            yield node.lineno, _with_names(node)
            continue
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in parts and len(node.value.split()) > 1:
            yield node.lineno, _marked_up(node.value)


def _with_names(node: ast.JoinedStr) -> str:
    """A formatted message, with `code` where a value is filled in."""
    text = ""
    for value in node.values:
        is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
        text += value.value if is_text else "`code`"
    return _marked_up(text)


def _marked_up(text: str) -> str:
    """Text as a page writes it: single backticks, no indented lines, no names of attributes."""
    return re.sub(r"(?m)^ +(?:\w+: )?", "", text.replace("``", "`"))


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Comments; lines that follow one another are one text."""
    first = 0
    last = 0
    block: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        if block and line != last + 1:
            yield first, " ".join(block)
            block = []
        if not block:
            first = line
        block.append(token.string.lstrip("# "))
        last = line
    if block:
        yield first, " ".join(block)


if __name__ == "__main__":
    for package in sys.argv[1:]:
        for module in sorted((ROOT / package).rglob("*.py")):
            for number, fault in code_faults(module):
                place = module.relative_to(ROOT)
                print(f"{place}:{number}: {fault.remedy}: {fault.sentence}")
