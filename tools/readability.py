#!/usr/bin/env python3
"""Measures how hard lines and functions of Python code are to read.

    python tools/readability.py FOLDER...            a table, and the hardest functions
    python tools/readability.py --limits FOLDER...   exit code 1 if a limit below is exceeded

Packing more into a line lowers line counts, so no figure counts only lines: layout cannot improve
syntax nodes per line of code (without blank lines, comments and docstrings), or nodes, branches
and statements of a function. A column counts per 1,000 lines of code, unless it is a share in
percent or a number of functions.
"""

import sys
from collections import Counter
from pathlib import Path

from code_measures import Figures, Function, limited, measure

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
