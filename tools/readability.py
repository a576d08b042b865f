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
from dataclasses import dataclass
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
# Folders with rules of operators and layers, whose formulas take more nodes; rows of their own.
DENSE = {"lowering", "zoo"}
DENSE_NODES = 6.5
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

# Columns of the table, each with its width; the first is the folder.
COLUMNS = {
    "code": 8,
    "doc %": 7,
    "comm/k": 8,
    "nodes": 9,
    "nodes/line": 11,
    "compr/k": 9,
    "packed/k": 9,
    "vague/k": 9,
    ">300": 6,
    ">12 br": 7,
    ">100 col %": 11,
}
FOLDER_WIDTH = 28

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
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


def docstring_lines(tree: ast.AST) -> set[int]:
    """Return the numbers of lines with strings that are statements."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        # A lambda's body is an expression.
        if not isinstance(body, list):
            continue
        for statement in body:
            if is_text(statement):
                first = statement.lineno
                last = statement.end_lineno
                lines.update(range(first, last + 1))
    return lines


def is_text(statement: ast.stmt) -> bool:
    """Return whether a statement is only a string."""
    if not isinstance(statement, ast.Expr):
        return False
    value = statement.value
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def own_nodes(function: ast.AST) -> list[ast.AST]:
    """Return the nodes of a function without those of nested functions, and without operators."""
    nodes: list[ast.AST] = []
    waiting = [function]
    while waiting:
        parent = waiting.pop()
        for child in ast.iter_child_nodes(parent):
            if isinstance(child, OPERATORS):
                continue
            nodes.append(child)
            # A nested function counts as one node here, and is measured by itself.
            if not isinstance(child, FUNCTIONS):
                waiting.append(child)
    return nodes


def measure_function(function: FunctionNode, path: Path) -> Function:
    """Measure one function."""
    nodes = own_nodes(function)
    branches = sum(isinstance(node, BRANCHES) for node in nodes)
    place = f"{path}:{function.lineno} {function.name}"
    return Function(len(nodes), branches, place)


def is_packed(node: ast.AST) -> bool:
    """Return whether a node assigns several values to several names."""
    if not isinstance(node, ast.Assign):
        return False
    has_several_names = isinstance(node.targets[0], ast.Tuple)
    has_several_values = isinstance(node.value, ast.Tuple)
    return has_several_names and has_several_values


def is_vague(node: ast.AST) -> bool:
    """Return whether a node assigns to a name that does not describe the value."""
    if not isinstance(node, ast.Name):
        return False
    is_assigned = isinstance(node.ctx, ast.Store)
    return is_assigned and node.id in VAGUE


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


def files_of(root: Path) -> list[Path]:
    """Return the modules of a folder, without its dense folders, which have rows of their own.

    Database migrations are left out, because they must not change.
    """
    if root.is_file():
        return [root]
    modules = []
    for path in root.rglob("*.py"):
        folders = set(path.relative_to(root).parts)
        if not folders & {"migrations", *DENSE}:
            modules.append(path)
    return sorted(modules)


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


def head() -> str:
    """Return the first line of the table."""
    cells = ["folder".ljust(FOLDER_WIDTH)]
    for title, width in COLUMNS.items():
        cells.append(title.rjust(width))
    return "".join(cells)


def row_of(folder: str, total: Counter[str], figures: Figures) -> str:
    """Return a folder's row of the table."""
    code = max(total["code lines"], 1)
    lines = max(total["lines"], 1)
    documented = 100 * total["docstring lines"] / lines
    comments = 1000 * total["comments"] / code
    values = [
        str(code),
        f"{documented:.1f}",
        f"{comments:.1f}",
        str(total["nodes"]),
        f"{figures['nodes/line']:.2f}",
        f"{figures['comprehensions']:.1f}",
        f"{figures['packed']:.1f}",
        f"{figures['vague names']:.1f}",
        str(figures["functions>300"]),
        str(figures["functions>12 branches"]),
        f"{figures['lines>100']:.1f}",
    ]
    # The end of a path tells more than its beginning.
    name = folder[-FOLDER_WIDTH:]
    cells = [name.ljust(FOLDER_WIDTH)]
    widths = COLUMNS.values()
    for value, width in zip(values, widths, strict=True):
        cells.append(value.rjust(width))
    return "".join(cells)


def exceeded_limits(folder: str, figures: Figures) -> list[str]:
    """Return a line for each limit that a folder exceeds, with its figure."""
    limits = dict(LIMITS)
    if Path(folder).name in DENSE:
        limits["nodes/line"] = DENSE_NODES
    exceeded = []
    for name, value in figures.items():
        limit = limits[name]
        if value > limit:
            exceeded.append(f"{folder}: {name} {value:.4g} (limit {limit})")
    return exceeded


def main(arguments: list[str]) -> int:
    """Measure the given folders, print the table, and return the exit code."""
    hold = "--limits" in arguments
    print(head())
    exceeded: list[str] = []
    all_functions: list[Function] = []
    for folder in arguments:
        if folder.startswith("--"):
            continue
        modules = files_of(Path(folder))
        total, functions = measure(modules)
        figures = limited(total, functions)
        print(row_of(folder, total, figures))
        exceeded += exceeded_limits(folder, figures)
        all_functions += functions
    print("\nhardest functions (nodes, branches):")
    hardest = sorted(all_functions, reverse=True)
    for function in hardest[:20]:
        print(f"{function.nodes:6}{function.branches:5}  {function.place}")
    if not hold:
        return 0
    for line in exceeded:
        print("over the limit:", line)
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
