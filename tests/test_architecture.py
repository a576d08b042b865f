"""The architecture page shows the code as it is: every package, every state, every decision."""

import re
from pathlib import Path

import pytest

from broker_server.store import machine as round_machine
from device_runtime.agent import machine as device_machine

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
DIAGRAMS = re.findall(r"```mermaid\n(.*?)```", PAGE, re.DOTALL)


def edges(diagram: str) -> set[tuple[str, str, str]]:
    return set(re.findall(r"^ +([\w-]+) --> ([\w-]+): ([\w-]+)$", diagram, re.MULTILINE))


def rows(machine) -> set[tuple[str, str, str]]:
    return {
        (state.value, after.value, event.value)
        for (state, event), after in machine.TRANSITIONS.items()
    }


def test_the_picture_of_a_round_is_its_table():
    assert edges(DIAGRAMS[0]) == rows(round_machine)


def test_the_picture_of_a_device_is_part_of_its_table():
    """All that happens when nothing goes wrong; no edge that does not exist, and no state left out
    but the last.
    """
    shown = edges(DIAGRAMS[1])
    assert shown <= rows(device_machine)
    states = {state.value for state in device_machine.State} - {device_machine.State.STOPPED.value}
    assert {edge[0] for edge in shown} | {edge[1] for edge in shown} == states


@pytest.mark.parametrize(
    "package", sorted(path.parent for path in ROOT.glob("*/__init__.py")), ids=lambda p: p.name
)
def test_every_package_is_on_the_page(package):
    assert f"`{package.name}`" in PAGE
    row = next((line for line in PAGE.splitlines() if line.startswith(f"| `{package.name}`")), "")
    for init in package.glob("*/__init__.py") if row else ():
        name = init.parent.name
        assert f"`{name}`" in row or f"`{package.name}/{name}`" in row, init.parent


def test_every_decision_is_linked():
    for decision in (ROOT / "docs" / "adr").glob("[0-9]*.md"):
        assert f"(adr/{decision.name})" in PAGE, f"{decision.name} is not linked"
