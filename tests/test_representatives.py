"""Of each kind of slow proof CI runs one: what `tests/representatives.py` names is there, and names
every kind.
"""

import re
from pathlib import Path

import pytest

from tests.representatives import (
    INSTALLED,
    SLOW,
    module_of,
    modules_without_quick_cases,
    representatives,
)

ROOT = Path(__file__).parents[1]
EXTRAS = ("device", "server", "export")


def marked(collected, name):
    """The tests that carry a mark."""
    return {test for test, marks in collected.items() if name in marks}


def test_every_slow_module_has_a_representative(collected):
    """One where a slow test has no case in the default suite, and none where all have."""
    slow = marked(collected, "slow")
    quick = collected.keys() - slow - marked(collected, "installed") - marked(collected, "arm")
    asked = {module_of(test) for test in collected}
    assert modules_without_quick_cases(slow, quick) == SLOW.keys() & asked


def test_every_representative_is_a_slow_test(collected):
    """Each that is named is collected under this name, and the default suite does not run it
    anyway.
    """
    asked = {module_of(test) for test in collected}
    named = {test for test in representatives() if module_of(test) in asked}
    assert named <= marked(collected, "slow") | marked(collected, "installed")
    assert named == marked(collected, "representative")


@pytest.mark.parametrize("module", SLOW)
def test_the_module_is_there(module):
    """A module that was renamed is renamed here."""
    assert (ROOT / module).is_file()


def test_an_extra_of_each_kind_is_installed():
    """CI tries a board, a server and an exporter from the wheel."""
    text = (ROOT / "tests/packaging/test_installed.py").read_text()
    for extra in EXTRAS:
        assert any(extra in re.split(r"\W|_", test.partition("::")[2]) for test in INSTALLED)
        assert f'"{extra}"' in text


def test_the_training_suite_finds_its_tests(collected):
    """They lie in the folders that `make test-training` collects."""
    makefile = (ROOT / "Makefile").read_text()
    folders = re.search(r"(?m)^TRAINING_TESTS := (.*)$", makefile)[1].split()
    training = marked(collected, "ort_training")
    assert {
        test for test in training if not test.startswith(tuple(f"{folder}/" for folder in folders))
    } == set()


def test_a_kind_without_a_representative_is_seen():
    """A slow test of another name than those of the default suite needs one; further cases of a
    quick test do not.
    """
    quick = {"tests/test_a.py::test_one[1]", "tests/test_b.py::test_two"}
    slow = {
        "tests/test_a.py::test_one[2]",
        "tests/test_b.py::test_three[1]",
        "tests/test_b.py::test_three[2]",
    }
    assert modules_without_quick_cases(slow, quick) == {"tests/test_b.py"}
