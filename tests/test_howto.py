"""The ways of docs/howto.md: each command is one that there is, each key one that is read; what runs them is named."""

import re
import shlex
from pathlib import Path

import pytest

from shoal.reference import FILES, commands, keys_of

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "howto.md").read_text()
TYPED = [shlex.split(line) for line in re.findall(r"^    (\S.*)$", TEXT, re.MULTILINE)]
BLOCKS = re.findall(r"^```toml\n# (\S+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
# What is not executed here takes another machine, a network, or minutes. These tests do the same with real processes.
EXECUTED = {
    "init": "tests/shoal/test_templates.py",
    "export": "tests/shoal/test_templates.py",
    "enroll": "tests/fleet/test_identity.py",
    "up": "tests/test_tutorial.py",
    "device": "tests/test_tutorial.py",
    "simulate": "tests/simulation/test_ray.py",
    "flash": "tests/shoal/flash",
    "track": "tests/shoal/test_tracking.py",
}


def test_every_command_can_be_typed():
    """The command is there, with each of its options, and somewhere it is executed."""
    known = {path.removeprefix("shoal "): options for path, _, options in commands()}
    assert len(TYPED) > 8
    for program, *words in TYPED:
        assert program == "shoal"
        name = " ".join(words[:2]) if " ".join(words[:2]) in known else words[0]
        options = {word for typed, _ in known[name] for word in re.findall(r"--[\w-]+", typed)}
        assert {word for word in words if word.startswith("--")} <= options, words
        assert (ROOT / EXECUTED[words[0]]).exists()


@pytest.mark.parametrize(("name", "text"), BLOCKS)
def test_every_key_is_read(name, text):
    """In the table in which it stands, and by the file that the block names."""
    table, found = "", {(re.sub(r", .*", "]", key.table), key.name) for key in keys_of(FILES[name][0])}
    for line in text.splitlines():
        if line.startswith("["):
            table = line
        elif line:
            assert (table, line.split(" = ")[0]) in found, line


def test_no_block_is_left_out():
    """Each names its file."""
    assert len(BLOCKS) == TEXT.count("```toml") == 4
