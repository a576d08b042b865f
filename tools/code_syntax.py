"""Tells what a syntax node of Python code is, as far as it is hard to read."""

import ast

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

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


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
