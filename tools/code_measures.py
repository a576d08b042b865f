"""Counts lines, syntax nodes and functions of modules of Python code."""

import ast
import io
import tokenize
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from code_syntax import (
    BRANCHES,
    COMPREHENSIONS,
    FUNCTIONS,
    OPERATORS,
    FunctionNode,
    docstring_lines,
    is_nested_choice,
    is_packed,
    is_vague,
    own_nodes,
)

Figures = dict[str, float]


@dataclass(frozen=True, order=True)
class Function:
    """How hard a function is to read; the hardest sort last.

    Attributes:
        nodes: syntax nodes, without those of nested functions.
        branches: nodes that are a choice or a loop.
        place: file, line and name.
    """

    nodes: int
    branches: int
    place: str


def measure_function(function: FunctionNode, path: Path) -> Function:
    """Measure one function."""
    nodes = own_nodes(function)
    branches = sum(isinstance(node, BRANCHES) for node in nodes)
    place = f"{path}:{function.lineno} {function.name}"
    return Function(len(nodes), branches, place)


def count_nodes(tree: ast.AST, total: Counter[str]) -> None:
    """Add the counts of a module's nodes."""
    for node in ast.walk(tree):
        if isinstance(node, OPERATORS):
            continue
        total["nodes"] += 1
        total["comprehensions"] += isinstance(node, COMPREHENSIONS)
        total["packed"] += is_packed(node)
        total["walrus"] += isinstance(node, ast.NamedExpr)
        total["ternaries in ternaries"] += is_nested_choice(node)
        total["vague names"] += is_vague(node)


def count_lines(source: str, documented: set[int], total: Counter[str]) -> None:
    """Add the counts of a module's lines, some of which are documentation."""
    # The tokenizer tells a comment from a string that has a # in it.
    reader = io.StringIO(source)
    for token in tokenize.generate_tokens(reader.readline):
        is_comment = token.type == tokenize.COMMENT
        total["comments"] += is_comment
    total["docstring lines"] += len(documented)
    for number, line in enumerate(source.splitlines(), 1):
        total["lines"] += 1
        total["lines>100"] += len(line) > 100
        content = line.strip()
        if not content or content.startswith("#"):
            continue
        total["code lines"] += number not in documented


def measure(files: list[Path]) -> tuple[Counter[str], list[Function]]:
    """Measure files together, and each of their functions."""
    total: Counter[str] = Counter()
    functions: list[Function] = []
    for path in files:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        documented = docstring_lines(tree)
        count_lines(source, documented, total)
        count_nodes(tree, total)
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS):
                functions.append(measure_function(node, path))
    return total, functions


def limited(total: Counter[str], functions: list[Function]) -> Figures:
    """Return the figures that have a limit, by the names that `LIMITS` has for them."""
    code = max(total["code lines"], 1)
    lines = max(total["lines"], 1)
    long_functions = 0
    branching_functions = 0
    for function in functions:
        long_functions += function.nodes > 300
        branching_functions += function.branches > 12
    return {
        "nodes/line": total["nodes"] / code,
        "comprehensions": 1000 * total["comprehensions"] / code,
        "packed": 1000 * total["packed"] / code,
        "vague names": 1000 * total["vague names"] / code,
        "functions>300": long_functions,
        "functions>12 branches": branching_functions,
        "lines>100": 100 * total["lines>100"] / lines,
    }
