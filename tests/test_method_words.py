"""A method is a strategy and, if it needs one, a routine or a chooser: nothing else in the product
names it.
"""

import re
from pathlib import Path

import pytest

from tests.test_structure import PACKAGES

ROOT = Path(__file__).parents[1]
# "Personal model" is a term of the whole field.
MUTUAL = re.compile("fml|mutual|meme", re.IGNORECASE)
MUTUAL_FILES = {
    "broker_server/strategies/fml.py",
    "device_runtime/training/routines/__init__.py",
    "device_runtime/training/routines/mutual.py",
    "shoal/cli/commands/export_mutual.py",
    "shoal/cli/main.py",  # the table of all commands
    "trainer_export/routines/mutual.py",
}
WHALE = re.compile("whale", re.IGNORECASE)
WHALE_FILES = {
    "broker_server/strategies/whalefl.py",
    "device_runtime/training/choosers/__init__.py",
    "device_runtime/training/choosers/whalefl.py",
}
LOW_RANK = re.compile("hetlora|flexlora", re.IGNORECASE)
LOW_RANK_FILES = {"broker_server/strategies/flexlora.py", "broker_server/strategies/hetlora.py"}


def named(words: re.Pattern[str]) -> set[str]:
    """The product files that have one of the words, in their text or in their name."""
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    names = {path.relative_to(ROOT).as_posix(): path for path in paths}
    return {
        name for name, path in names.items() if words.search(name) or words.search(path.read_text())
    }


@pytest.mark.parametrize(
    ("words", "files", "most"),
    [(MUTUAL, MUTUAL_FILES, 8), (WHALE, WHALE_FILES, 5), (LOW_RANK, LOW_RANK_FILES, 2)],
    ids=["FML", "WHALE-FL", "low-rank"],
)
def test_a_methods_words_stand_in_its_own_files_alone(words, files, most):
    """A new method touches its own files; one that reads these needs to look nowhere else."""
    assert named(words) <= files
    assert len(files) <= most
