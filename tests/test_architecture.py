"""The architecture page shows the code as it is: every package and the states."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def test_the_states_are_shown():
    """`tests/documents/test_pictures.py` compares the pictures with the tables of the code."""
    assert "(pictures/round-states.svg)" in PAGE
    assert "(pictures/device-states.svg)" in PAGE


@pytest.mark.parametrize(
    "package", sorted(path.parent for path in ROOT.glob("*/__init__.py")), ids=lambda p: p.name
)
def test_every_package_is_on_the_page(package):
    assert f"`{package.name}`" in PAGE
    row = next((line for line in PAGE.splitlines() if line.startswith(f"| `{package.name}`")), "")
    for init in package.glob("*/__init__.py") if row else ():
        name = init.parent.name
        assert f"`{name}`" in row or f"`{package.name}/{name}`" in row, init.parent


def test_the_index_of_decisions_has_each_decision():
    """With its title."""
    index = (ROOT / "docs" / "adr" / "index.md").read_text()
    for decision in (ROOT / "docs" / "adr").glob("[0-9]*.md"):
        number, _, title = decision.read_text().splitlines()[0].removeprefix("# ").partition(". ")
        assert f"| {number} | [{title}]({decision.name}) |" in index
