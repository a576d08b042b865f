"""Docstrings, messages and comments are written in plain English, as `docs/writing.md` describes."""

import pytest

from tests.documents.code_words import DONE, code_faults, texts
from tests.documents.plain import ROOT


@pytest.mark.parametrize("package", DONE)
def test_a_package_is_plain_english(package):
    """No sentence of its modules breaks a rule that a program can see."""
    wrong = []
    for module in sorted((ROOT / package).rglob("*.py")):
        for line, fault in code_faults(module):
            wrong.append(f"{module.relative_to(ROOT)}:{line}: {fault.remedy}: {fault.sentence}")
    assert wrong == []


def test_docstrings_messages_and_comments_are_read():
    """Names of attributes are left out, and values of formatted messages."""
    source = (
        '"""A module.\n\nAttributes:\n    heard: when it was last received.\n"""\n\n'
        "# The server is told\n# of it.\nraise ValueError(f'{told} is no name')\n"
    )
    assert [text for _, text in texts(source)] == [
        "A module.\n\nAttributes:\nwhen it was last received.\n",
        "`code` is no name",
        "The server is told of it.",
    ]
