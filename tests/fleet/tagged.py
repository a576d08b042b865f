"""Three token labelling tasks with label sets of their own, made from the sentences of CoLA by
fixed rules.

The corpora of InclusiveFL's NER experiments (SMM4H, ADE, CADEC) cannot be had here. These tasks
stand for them: each device's entities are other ones, their labels have other numbers, and a
sentence is never shared between devices.

- ``NAME``: words that are mostly written with a capital, one after another;
- ``PRONOUN``: personal pronouns and their kin;
- ``PHRASE``: an article or demonstrative with the word after it.
"""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simulation.data.text import Vocabulary, read_lines

__all__ = ["LABELS", "names_in", "read_sentences", "tag", "tagged"]

LABELS = {
    "weak": ("O", "B-NAME", "I-NAME"),
    "medium": ("O", "B-PHRASE", "I-PHRASE", "B-PRONOUN"),
    "strong": ("O", "B-PRONOUN", "B-NAME", "I-NAME", "B-PHRASE", "I-PHRASE"),
}
"""The tags of each task, by their label."""

_PRONOUNS = frozenset(
    {
        "i",
        "me",
        "you",
        "he",
        "him",
        "himself",
        "she",
        "her",
        "herself",
        "it",
        "we",
        "us",
        "they",
        "them",
        "who",
        "whom",
    }
)
_OPENERS = frozenset({"the", "a", "an", "this", "that", "these", "those"})


def read_sentences(folder: Path) -> list[list[str]]:
    """The words of CoLA's sentences in the order of its training file, both kinds, at least three
    words each.
    """
    lines = read_lines(folder / "cola" / "in_domain_train.tsv")
    sentences = [re.findall(r"\w+|[^\w\s]", line.split("\t")[3]) for line in lines if line]
    return [words for words in sentences if len(words) >= 3]


def names_in(sentences: Sequence[Sequence[str]]) -> frozenset[str]:
    """The words that stand with a capital beyond the beginning of a sentence more often than
    without one.
    """
    seen = Counter(word for words in sentences for word in words[1:])
    return frozenset(
        word
        for word in seen
        if word[0].isupper() and word != "I" and seen[word] > seen[word.lower()]
    )


def tag(words: Sequence[str], names: frozenset[str]) -> list[str]:
    """The tag of each word; a name wins over a phrase it stands in."""
    tags = ["O"] * len(words)
    for place, word in enumerate(words):
        before = tags[place - 1] if place else "O"
        if word in names:
            tags[place] = "I-NAME" if before.endswith("-NAME") else "B-NAME"
        elif word.lower() in _PRONOUNS:
            tags[place] = "B-PRONOUN"
        elif word.lower() in _OPENERS:
            tags[place] = "B-PHRASE"
        elif before == "B-PHRASE" and word[0].isalpha():
            tags[place] = "I-PHRASE"
    return tags


def tagged(
    sentences: Sequence[Sequence[str]],
    labels: Sequence[str],
    names: frozenset[str],
    vocabulary: Vocabulary,
    length: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Token ids and labels; what a task has no label for is outside, and padding counts for
    nothing.

    Args:
        sentences: their words.
        labels: the tags of the task, by their label.
        names: from `names_in`.
        vocabulary: of words.
        length: words of a sentence; longer ones are cut.

    Returns:
        Two arrays, int64 [sentences, length].
    """
    numbers = {name: number for number, name in enumerate(labels)}
    x = vocabulary.encode([" ".join(words) for words in sentences], length)
    y = np.full_like(x, -1)  # a label that counts for nothing in loss and metrics
    for row, words in zip(y, sentences, strict=True):
        kept = [numbers.get(name, 0) for name in tag(words, names)][:length]
        row[: len(kept)] = kept
    return x, y
