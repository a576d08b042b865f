"""The table of attacks, docs/attacks.md, made of the marks of the tests that hold them.

    python -m tests.documents.attacks > docs/attacks.md

A test that tries an attack says so: `@pytest.mark.attack(attacker, attempt, result, date)`. The
marks are read from the files, so that no test has to be imported.
"""

import ast
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ATTACKERS", "PAGE", "Attack", "attacks_in", "read_attacks", "render"]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "attacks.md"
ATTACKERS = {
    "outsider": (
        "Outsiders",
        "Outsiders are clients of the broker that have no enrolment, and other users of the computer.",
    ),
    "member": (
        "Devices",
        "These attackers are enrolled devices of the fleet that do not follow the protocol.",
    ),
    "broker": (
        "Brokers and servers",
        "The attacker is a malicious broker, or a server that somebody has taken over.",
    ),
    "page user": (
        "Users of the page",
        "These attackers are clients of the page that `shoal up --view` serves.",
    ),
    "file": (
        "Files",
        "These attacks use files that an operator receives from somebody else, or modified files.",
    ),
}
_HEAD = """# Attacks

This page lists every attack that a test tries, together with its result. `make docs` generates the page from the marks
of the tests (`@pytest.mark.attack`). The date is the day on which the test got its present form.
[Security](security.md) explains the defences and the remaining risks.

{counts}
"""
_MARK = "pytest.mark.attack"


@dataclass(frozen=True)
class Attack:
    """An attack that a test tries.

    Attributes:
        attacker: one of `ATTACKERS`.
        attempt: what the attacker does.
        result: what comes of it.
        date: since when the test tries it in this form.
        file: of the test, from the root.
        test: the name of the function.
    """

    attacker: str
    attempt: str
    result: str
    date: str
    file: str
    test: str

    @property
    def row(self) -> str:
        """A row of the table."""
        test = f"`{self.file}` `{self.test}`"
        return f"| {self.attempt} | {self.result} | {test} | {self.date} |\n"


def attacks_in(text: str, file: str) -> Iterator[Attack]:
    """Yield the attacks of a file of tests.

    Raises:
        ValueError: a mark is not on a test, or does not have four texts.
    """
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            if not isinstance(decorator, ast.Call) or ast.unparse(decorator.func) != _MARK:
                continue
            values = [ast.literal_eval(argument) for argument in decorator.args]
            if not node.name.startswith("test_") or len(values) != 4 or decorator.keywords:
                raise ValueError(f"{file}: {node.name}: attack(attacker, attempt, result, date)")
            yield Attack(*values, file, node.name)


def read_attacks() -> list[Attack]:
    """Return the attacks of all tests, in the order of their files."""
    attacks: list[Attack] = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if _MARK in text:
            attacks += attacks_in(text, path.relative_to(ROOT).as_posix())
    return attacks


def render(attacks: list[Attack]) -> str:
    """Return the page."""
    counts = []
    tables = ""
    for attacker, (heading, explanation) in ATTACKERS.items():
        rows = [attack.row for attack in attacks if attack.attacker == attacker]
        counts.append(f"{len(rows)} by {heading.lower()}")
        tables += f"\n## {heading}\n\n{explanation}\n\n"
        tables += "| Attack | Result | Test | Date |\n|---|---|---|---|\n"
        tables += "".join(rows)
    summary = f"There are {len(attacks)} attacks: {', '.join(counts[:-1])}, and {counts[-1]}."
    return _HEAD.format(counts=textwrap.fill(summary, 118)) + tables


if __name__ == "__main__":
    sys.stdout.write(render(read_attacks()))
