"""Entities are counted as seqeval counts them: type, start and end must all be right."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_protocol.errors import DataError
from tests.fleet.named_entities import Entity, Scores, entities, entity_scores

TAGS = st.lists(st.sampled_from(["O", "B-A", "I-A", "B-B", "I-B"]), max_size=12)


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("O O", []),
        ("B-A I-A O B-B", [("A", 0, 2), ("B", 3, 4)]),
        ("B-A B-A I-A", [("A", 0, 1), ("A", 1, 3)]),
        ("I-A I-A O I-B", [("A", 0, 2), ("B", 3, 4)]),
        ("B-A I-B I-B", [("A", 0, 1), ("B", 1, 3)]),
        ("B-two-words I-two-words", [("two-words", 0, 2)]),
    ],
)
def test_spans_of_tags(tags, expected):
    """An entity ends at O, at another B, or where the type changes; a stray I starts one."""
    assert entities(tags.split()) == [Entity(*span) for span in expected]


@given(TAGS)
def test_entities_cover_the_tagged_tokens(tags):
    """Every tagged token is in exactly one entity of its type, and no other token is."""
    covered = {place: span.kind for span in entities(tags) for place in range(span.start, span.end)}
    assert covered == {place: tag[2:] for place, tag in enumerate(tags) if tag != "O"}


def test_scores_by_hand():
    """Of two drugs one is found and one has a wrong end; a dose is missed, a disease made up."""
    present = [["B-drug", "I-drug", "O", "B-dose"], ["O", "B-drug", "I-drug"]]
    predicted = [["B-drug", "I-drug", "O", "O"], ["B-disease", "B-drug", "O"]]
    scores = entity_scores(present, predicted)
    assert scores == {"disease": Scores(0, 1, 0), "dose": Scores(0, 0, 1), "drug": Scores(1, 2, 2)}
    assert (scores["drug"].precision, scores["drug"].recall, scores["drug"].f1) == (0.5, 0.5, 0.5)
    assert (scores["dose"].precision, scores["dose"].recall, scores["dose"].f1) == (0.0, 0.0, 0.0)
    micro = sum(scores.values(), Scores(0, 0, 0))
    assert micro.f1 == pytest.approx(1 / 3)


@given(st.lists(TAGS, min_size=1, max_size=4))
def test_a_perfect_prediction_scores_one(sentences):
    """Every type that occurs has F1 1."""
    assert all(score.f1 == 1.0 for score in entity_scores(sentences, sentences).values())


@pytest.mark.parametrize("tag", ["X-A", "B", "O-A", "", "B-"])
def test_malformed_tags_are_refused(tag):
    """The error names the tag and its place."""
    with pytest.raises(DataError, match="of token 1 is none of"):
        entities(["O", tag])


def test_unequal_lengths_are_refused():
    """A sentence or a tag without its prediction."""
    with pytest.raises(DataError, match="0 predicted sentences for 1"):
        entity_scores([["O"]], [])
    with pytest.raises(DataError, match="sentence 0 has 1 tags and 2"):
        entity_scores([["O"]], [["O", "O"]])
