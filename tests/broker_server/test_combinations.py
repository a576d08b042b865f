"""That settings meet in one place: who else asks whether a run has a buffer, noise or secure
sums.
"""

import ast
from pathlib import Path
from types import ModuleType

import pytest

from broker_server.settings import combinations
from broker_server.settings.combinations import STAGES
from broker_server.strategies.stage import Stage, stated
from broker_server.strategies.traits import Trait
from fleet_protocol import discovery

ROOT = Path(__file__).parents[2]
PACKAGES = ("broker_server", "simulation", "reproduction", "shoal")
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


def stated_in(tree: ast.AST) -> set[int]:
    """What stands in the values of stages, which are the one place to ask for a part."""
    return {
        id(node)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "Stage"
        for node in ast.walk(call)
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


def asking(source: str) -> list[int]:
    """Lines of a module whose conditions ask for a part, beside the values of stages."""
    tree = ast.parse(source)
    names = names_of_parts(tree)
    stated = stated_in(tree)

    def asks(test: ast.expr) -> bool:
        named = any(isinstance(node, ast.Name) and node.id in names for node in ast.walk(test))
        return named or parts_in(test)

    return [test.lineno for test in conditions(tree) if id(test) not in stated and asks(test)]


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("if run.secure_sum is not None:\n    pass", [1]),
        ("clip = noise.clip if run.privacy else 0", [1]),
        ("while config.round.buffer:\n    pass", [1]),
        ("noise = config.central_noise\nif noise is None:\n    pass", [2]),
        ("late = config.round.buffer is not None", [1]),
        ("tables = [table for table in tables if run.secure_sum]", [1]),
        ("def hide(run):\n    return run.local_noise is None or run.x", [2]),
        ("kept = Stage(wanted=lambda run: run.secure_sum is not None)", []),
        ("if context.keeps(Trait.SINGLE):\n    clip = run.secure_sum.clip", []),
    ],
)
def test_it_sees_what_asks(source, lines):
    """Each kind of condition counts, but for that of a stage."""
    assert asking(source) == lines


def test_every_stage_is_collected_from_its_module():
    """A module that makes a stage has it among those that are collected."""
    made = {
        node.args[0].value
        if node.args
        else next(k.value.value for k in node.keywords if k.arg == "name")
        for path in sorted((ROOT / "broker_server").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Stage"
    }
    assert made == {stage.name for stage in STAGES}
    assert len(made) >= 14


def test_a_new_stage_states_its_traits_and_nothing_else_changes(monkeypatch):
    """A module of stages that is added is refused with what it breaks, by its own words."""
    module = ModuleType("broker_server.stages.added")
    module.STAGES = stated(
        Stage(
            name="robust.added",
            remedy="remove robust.added",
            setting="robust.added",
            wanted=lambda run: run.robust.merge == "krum",
            breaks=frozenset({Trait.ONE_VERSION}),
        )
    )
    modules = discovery.modules_of

    def with_one_more(package):
        yield from modules(package)
        if package == "broker_server.stages":
            yield module

    monkeypatch.setattr(discovery, "modules_of", with_one_more)
    stages = combinations.collect()
    assert [stage for stage in stages if stage not in STAGES] == [module.STAGES["robust.added"]]
    assert combinations.conflict(stages[:4]) == (
        'robust.merge = "krum" and robust.added are incompatible: robust.merge = "krum" requires that'
        " all updates of a round start from the same version of the model;"
        ' set robust.merge = "mean", or remove robust.added'
    )


def test_few_conditionals_ask_for_a_part_elsewhere():
    """A new part states its traits as the value of a stage; code elsewhere asks for traits."""
    places = [
        f"{path.relative_to(ROOT)}:{line}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for line in asking(path.read_text())
    ]
    assert len(places) <= MOST, places
