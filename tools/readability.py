#!/usr/bin/env python3
"""Measures how hard lines and functions of Python code are to read.

    python tools/readability.py FOLDER...            a table, and the hardest functions
    python tools/readability.py --limits FOLDER...   exit code 1 if a limit below is exceeded

Packing more into a line lowers line counts, so no figure counts only lines: layout cannot improve
syntax nodes per line of code (without blank lines, comments and docstrings), or nodes, branches
and statements of a function. A column counts per 1,000 lines of code, unless it is a share in
percent or a number of functions.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

LIMITS = {
    "nodes/line": 5.5,
    "comprehensions": 20.0,
    "packed": 2.0,
    "vague names": 2.0,
    "functions>300": 0,
    "functions>12 branches": 0,
    "lines>100": 0.0,
}
DENSE = {"trainer_export", "models"}  # tables of operators and of axes
DENSE_NODES = 6.2
BRANCHES = (
    ast.If,
    ast.IfExp,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.BoolOp,
    ast.comprehension,
    ast.match_case,
)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Parts of other nodes, which add nothing to read.
OPERATORS = (ast.expr_context, ast.operator, ast.boolop, ast.cmpop, ast.unaryop)
# Local names that do not describe their value.
_THINGS = "item items found known part parts made told said given"
_OTHERS = "other others rest one ones what which each"
VAGUE = frozenset(f"{_THINGS} {_OTHERS}".split())

HEAD = (
    f"{'folder':28}{'code':>8}{'doc %':>7}{'comm/k':>8}{'nodes':>9}{'nodes/line':>11}{'compr/k':>9}"
    f"{'packed/k':>9}{'vague/k':>9}{'>300':>6}{'>12 br':>7}{'>100 col %':>11}"
)

Function = tuple[int, int, str]
"""Nodes, branches, and the place of the function."""


def docstring_lines(tree: ast.AST) -> set[int]:
    """Return the numbers of lines with strings that are statements."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for statement in body:
            if is_text(statement):
                lines.update(range(statement.lineno, statement.end_lineno + 1))
    return lines


def is_text(statement: ast.stmt) -> bool:
    """Return whether a statement is only a string."""
    if not isinstance(statement, ast.Expr):
        return False
    return isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)


def own_nodes(function: ast.AST) -> list[ast.AST]:
    """Yield the nodes of a function without those of nested functions."""
    nodes: list[ast.AST] = []
    waiting = [function]
    while waiting:
        for child in ast.iter_child_nodes(waiting.pop()):
            nodes.append(child)
            if not isinstance(child, FUNCTIONS):
                waiting.append(child)
    return nodes


def measured_function(function: ast.FunctionDef | ast.AsyncFunctionDef, path: Path) -> Function:
    """Measure one function."""
    nodes = [node for node in own_nodes(function) if not isinstance(node, OPERATORS)]
    branches = sum(isinstance(node, BRANCHES) for node in nodes)
    return len(nodes), branches, f"{path}:{function.lineno} {function.name}"


def is_packed(node: ast.AST) -> bool:
    """Return whether a node assigns several values to several names."""
    if not isinstance(node, ast.Assign):
        return False
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def is_vague(node: ast.AST) -> bool:
    """Return whether a node assigns to a name that does not describe the value."""
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE


def is_nested_choice(node: ast.AST) -> bool:
    """Return whether a node is a conditional expression that contains another."""
    if not isinstance(node, ast.IfExp):
        return False
    return any(isinstance(inner, ast.IfExp) for inner in ast.iter_child_nodes(node))


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
    lines = source.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    total["comments"] += sum(token.type == tokenize.COMMENT for token in tokens)
    total["docstring lines"] += len(documented)
    total["lines"] += len(lines)
    total["lines>100"] += sum(len(line) > 100 for line in lines)
    for number, line in enumerate(lines, 1):
        is_comment = line.lstrip().startswith("#")
        total["code lines"] += bool(line.strip()) and not is_comment and number not in documented


def measure(files: list[Path]) -> tuple[Counter[str], list[Function]]:
    """Measure files together, and each of their functions."""
    total: Counter[str] = Counter()
    functions = []
    for path in files:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        count_lines(source, docstring_lines(tree), total)
        count_nodes(tree, total)
        definitions = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
        functions += [measured_function(node, path) for node in definitions]
    return total, functions


def files_of(root: Path) -> list[Path]:
    """Return the modules of a folder, without database migrations, which must not change."""
    if root.is_file():
        return [root]
    return sorted(path for path in root.rglob("*.py") if "migrations" not in path.parts)


def limited(total: Counter[str], functions: list[Function]) -> dict[str, float]:
    """Return the figures that have a limit."""
    code = max(total["code lines"], 1)
    return {
        "nodes/line": total["nodes"] / code,
        "comprehensions": 1000 * total["comprehensions"] / code,
        "packed": 1000 * total["packed"] / code,
        "vague names": 1000 * total["vague names"] / code,
        "functions>300": sum(nodes > 300 for nodes, _, _ in functions),
        "functions>12 branches": sum(branches > 12 for _, branches, _ in functions),
        "lines>100": 100 * total["lines>100"] / max(total["lines"], 1),
    }


def row_of(folder: str, total: Counter[str], figures: dict[str, float]) -> str:
    """Return a folder's row of the table."""
    code = max(total["code lines"], 1)
    documented = 100 * total["docstring lines"] / max(total["lines"], 1)
    comments = 1000 * total["comments"] / code
    cells = [
        f"{folder[-28:]:28}{code:8}{documented:7.1f}{comments:8.1f}{total['nodes']:9}",
        f"{figures['nodes/line']:11.2f}{figures['comprehensions']:9.1f}{figures['packed']:9.1f}",
        f"{figures['vague names']:9.1f}{figures['functions>300']:6}",
        f"{figures['functions>12 branches']:7}{figures['lines>100']:11.1f}",
    ]
    return "".join(cells)


def passed_limits(folder: str, figures: dict[str, float]) -> list[str]:
    """Yield each limit that a folder exceeds, with its figure."""
    limits = dict(LIMITS)
    if Path(folder).name in DENSE:
        limits["nodes/line"] = DENSE_NODES
    return [
        f"{folder}: {name} {value:.4g} (limit {limits[name]})"
        for name, value in figures.items()
        if value > limits[name]
    ]


def main(arguments: list[str]) -> int:
    """Measure the given folders, print the table, and return the exit code."""
    hold = "--limits" in arguments
    folders = [argument for argument in arguments if not argument.startswith("--")]
    print(HEAD)
    passed: list[str] = []
    worst: list[Function] = []
    for folder in folders:
        total, functions = measure(files_of(Path(folder)))
        figures = limited(total, functions)
        print(row_of(folder, total, figures))
        passed += passed_limits(folder, figures)
        worst += functions
    print("\nhardest functions (nodes, branches):")
    for nodes, branches, where in sorted(worst, reverse=True)[:20]:
        print(f"{nodes:6}{branches:5}  {where}")
    if hold:
        for line in passed:
            print("over the limit:", line)
    return 1 if hold and passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
