"""The table of attacks is that of the tests' marks."""

import datetime as dt
from collections import Counter

import pytest

from tests.documents.attacks import ATTACKERS, PAGE, attacks_in, read_attacks, render


def test_the_page_is_that_of_the_marks():
    """`make docs` writes it."""
    attacks = read_attacks()
    assert PAGE.read_text() == render(attacks)
    assert render(attacks[1:]) != render(attacks)


def test_there_are_attacks_of_every_kind():
    """Each has an attacker, a sentence of its own, a result and a date."""
    attacks = read_attacks()
    counts = Counter(attack.attacker for attack in attacks)
    assert counts.keys() == ATTACKERS.keys()
    assert min(counts.values()) >= 8
    assert len(attacks) >= 100
    assert len({attack.attempt for attack in attacks}) == len(attacks)
    today = dt.datetime.now(dt.timezone.utc).date()
    for attack in attacks:
        assert attack.result
        assert dt.date(2026, 11, 20) <= dt.date.fromisoformat(attack.date) <= today
        assert "|" not in attack.row.replace(" | ", "")[1:-2]


@pytest.mark.parametrize(
    "marked",
    [
        "@pytest.mark.attack('file', 'a', 'b')\ndef test_a(): ...",
        "@pytest.mark.attack('file', 'a', 'b', date='c')\ndef test_a(): ...",
        "@pytest.mark.attack('file', 'a', 'b', 'c')\ndef a(): ...",
    ],
)
def test_a_mark_without_its_four_texts_is_an_error(marked):
    """A row would lack what the page promises."""
    with pytest.raises(ValueError, match="attacker, attempt, result, date"):
        list(attacks_in(marked, "tests/test_a.py"))
