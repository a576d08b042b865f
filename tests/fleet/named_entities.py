"""Named entities in tag sequences, and their precision, recall and F1 as seqeval and conlleval
count them.

Tags are ``O``, ``B-<type>`` and ``I-<type>``. An entity counts as found if type, start and end are
all right. As in seqeval's default mode an ``I`` that continues nothing starts an entity.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fleet_protocol.errors import DataError

__all__ = ["Entity", "Scores", "entities", "entity_scores"]


class Entity(NamedTuple):
    """A typed span.

    Attributes:
        kind: its type.
        start: its first token.
        end: the token after its last.
    """

    kind: str
    start: int
    end: int


@dataclass(frozen=True)
class Scores:
    """Counts of entities, from which every rate follows; add them up to join sets or types.

    Attributes:
        correct: entities that were found.
        found: entities that were predicted.
        present: entities that are there.
    """

    correct: int
    found: int
    present: int

    @property
    def precision(self) -> float:
        """Share of the predicted entities that are right; 0 if none was predicted."""
        return self.correct / self.found if self.found else 0.0

    @property
    def recall(self) -> float:
        """Share of the present entities that were found; 0 if there is none."""
        return self.correct / self.present if self.present else 0.0

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall; 0 if both are."""
        return 2.0 * self.correct / (self.found + self.present) if self.correct else 0.0

    def __add__(self, other: "Scores") -> "Scores":
        return Scores(
            self.correct + other.correct, self.found + other.found, self.present + other.present
        )


def entities(tags: Sequence[str]) -> list[Entity]:
    """List the entities of one sentence.

    Args:
        tags: one for each token.

    Returns:
        The entities in order.

    Raises:
        DataError: a tag is none of ``O``, ``B-<type>``, ``I-<type>``.
    """
    spans: list[Entity] = []
    kind = ""
    start = 0
    for place, tag in enumerate([*tags, "O"]):
        mark, _, current = tag.partition("-")
        if mark not in ("O", "B", "I") or (mark == "O") != (not current):
            raise DataError(f"tag {tag!r} of token {place} is none of O, B-<type>, I-<type>")
        if kind and (mark != "I" or current != kind):
            spans.append(Entity(kind, start, place))
            kind = ""
        if current and not kind:
            kind = current
            start = place
    return spans


def entity_scores(
    present: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]
) -> dict[str, Scores]:
    """Compare predicted tags with the true ones.

    Args:
        present: the true tags of each sentence.
        predicted: the predicted tags of each sentence, of the same lengths.

    Returns:
        The counts of each type, sorted by name. Their sum gives seqeval's micro average.

    Raises:
        DataError: a sentence has not as many predictions as tags, or a tag is malformed.
    """
    if len(present) != len(predicted):
        raise DataError(f"{len(predicted)} predicted sentences for {len(present)}")
    correct: Counter[str] = Counter()
    found: Counter[str] = Counter()
    there: Counter[str] = Counter()
    for number, (truth, guess) in enumerate(zip(present, predicted, strict=True)):
        if len(truth) != len(guess):
            raise DataError(f"sentence {number} has {len(truth)} tags and {len(guess)} predictions")
        true = set(entities(truth))
        guessed = set(entities(guess))
        there.update(entity.kind for entity in true)
        found.update(entity.kind for entity in guessed)
        correct.update(entity.kind for entity in true & guessed)
    return {
        kind: Scores(correct[kind], found[kind], there[kind])
        for kind in sorted(there.keys() | found.keys())
    }
