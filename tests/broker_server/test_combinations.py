"""That settings meet in one place: who else asks whether a run has a buffer, noise or secure
sums.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("broker_server", "simulation", "reproduction", "shoal")
THE_PLACE = ROOT / "broker_server" / "settings" / "feature_table.py"
PARTS = {"secure_sum", "privacy", "buffer", "central_noise", "local_noise"}
MOST = 9
Condition = ast.If | ast.IfExp | ast.While | ast.Assert


def parts_in(node: ast.AST) -> bool:
    """Whether an expression reads one of the parts from a configuration."""
    return any(isinstance(inner, ast.Attribute) and inner.attr in PARTS for inner in ast.walk(node))


def names_of_parts(tree: ast.AST) -> set[str]:
    """Names that a module gives to parts: ``noise = config.central_noise``."""
    return {
        node.targets[0].id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Attribute)
        and parts_in(node.value)
    }


def conditions(tree: ast.AST) -> list[ast.expr]:
    """What a module compares or branches by; what stands in a test counts with it."""
    tests = {}
    for node in ast.walk(tree):
        if isinstance(node, Condition):
            tests[id(node.test)] = node.test
        elif isinstance(node, ast.comprehension):
            tests |= {id(test): test for test in node.ifs}
        elif isinstance(node, ast.Compare):
            tests[id(node)] = node
    inner = {id(child) for test in tests.values() for child in ast.walk(test) if child is not test}
    return [test for key, test in tests.items() if key not in inner]


def asking(path: Path) -> list[int]:
    """Lines of a module whose conditions ask for a part."""
    tree = ast.parse(path.read_text())
    names = names_of_parts(tree)

    def asks(test: ast.expr) -> bool:
        named = any(isinstance(node, ast.Name) and node.id in names for node in ast.walk(test))
        return named or parts_in(test)

    return [test.lineno for test in conditions(tree) if asks(test)]


def test_few_conditionals_ask_for_a_part_elsewhere():
    """A new part is a row of the table; code elsewhere asks for traits."""
    places = [
        f"{path.relative_to(ROOT)}:{line}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if path != THE_PLACE
        for line in asking(path)
    ]
    assert len(places) <= MOST, places
