"""Documents are written in plain English, as `docs/writing.md` describes."""

import re

import pytest

from tests.documents.plain import DOCS, PATTERNS, ROOT, documents, faults, sentences_of

GUIDE = DOCS / "writing.md"


def examples() -> list[tuple[str, str]]:
    """The sentences of the guide, before and after."""
    table = GUIDE.read_text().partition("| Before | After |\n|---|---|\n")[2]
    rows = re.findall(r"^\| (.*?) \| (.*?) \|$", table, re.MULTILINE)
    return [(before, after) for before, after in rows]


def text_of(path):
    """A page, without the guide's examples of what not to write."""
    text = path.read_text()
    if path == GUIDE:
        text = text.replace('not "Whom it asks"', "")
        for before, _ in examples():
            text = text.replace(f"| {before} |", "|")
    return text


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_document_is_plain_english(path):
    """No sentence breaks a rule that a program can see."""
    found = faults(text_of(path))
    assert [f"{fault.remedy}: {fault.sentence}" for fault in found] == []


def test_the_guide_has_twenty_examples():
    """Patterns recognise most sentences of the first column, and no sentence of the second."""
    rows = examples()
    assert len(rows) == 20
    assert sum(bool(faults(before)) for before, _ in rows) >= 14
    assert [after for _, after in rows if faults(after)] == []


@pytest.mark.parametrize("remedy", PATTERNS)
def test_each_pattern_is_needed(remedy):
    """Each recognises an example of the guide, or one of these."""
    sentences = [before for before, _ in examples()]
    sentences += ["The device is in the house of another.", "The device goes on with its task."]
    sentences += ["Errors as of `read`.", "Rounds waited for it in vain.", "A file outside of it."]
    sentences += ["The norm of an update's difference to the sent weights."]
    found = [fault.remedy for sentence in sentences for fault in faults(sentence)]
    assert remedy in found


def test_good_sentences_pass():
    """Code, questions and ordinary phrases contain words that the patterns look for."""
    text = (
        "# What does the server see?\n\nThere is no release yet. A run is no longer held. "
        "Run `shoal told --alone`.\n\n    shoal said\n\n```toml\nheard = 1\n```\n"
        "Bring a model of your own making. Let alone two."
    )
    assert faults(text) == []
    assert len(list(sentences_of(text))) == 6
