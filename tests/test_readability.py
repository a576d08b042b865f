"""`tools/readability.py` counts what a line and a function ask of their reader, and not how the
code is laid out.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLAIN = '''"""A sum."""


def total(values: list[int]) -> int:
    """The sum."""
    result = 0
    for value in values:
        result += value
    return result
'''


def measured(folder: Path, text: str, *options: str) -> tuple[int, str]:
    """The exit code, and what is printed about a folder of one module."""
    folder.mkdir(exist_ok=True)
    (folder / "module.py").write_text(text)
    command = [sys.executable, ROOT / "tools" / "readability.py", *options, folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_plain_code_is_within_the_limits(tmp_path):
    """A module that says one thing a line ends with 0, and its functions are named with their
    size.
    """
    code, printed = measured(tmp_path / "plain", PLAIN, "--limits")
    assert code == 0
    assert "module.py:4 total" in printed
    assert "over the limit" not in printed


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("packed", "    result, start = 0, values[0]"),
        ("vague names", "    found = 0"),
        ("comprehensions", "    result = sum(value for value in values)"),
        ("lines>100", f"    result = 0  # {'a' * 100}"),
        ("functions>12 branches", "\n".join(["    if values:", "        result = 1"] * 13)),
        ("functions>300", "\n".join(["    print(result, values)"] * 61)),
        (
            "nodes/line",
            "    result = values[0] + values[1] * values[2] - values[3] + values[4] + values[5]\n"
            * 9,
        ),
    ],
)
def test_what_asks_too_much_is_named(tmp_path, name, line):
    """Each limit that is passed is named; it decides the exit code where `--limits` is given."""
    text = PLAIN.replace("    result = 0", line)
    code, printed = measured(tmp_path / "dense", text, "--limits")
    assert code == 1
    assert f"dense: {name} " in printed
    assert measured(tmp_path / "dense", text)[0] == 0


def test_layout_changes_nothing_but_lines(tmp_path):
    """Nodes of a function are the same on one line and on many."""
    joined = PLAIN.replace("total(values: list[int])", "total(\n    values: list[int],\n)")
    _, printed = measured(tmp_path / "one", PLAIN)
    _, laid_out = measured(tmp_path / "two", joined)
    assert (
        printed.split("hardest")[-1].split()[-4:-2] == laid_out.split("hardest")[-1].split()[-4:-2]
    )
