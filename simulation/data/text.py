"""Texts as token ids: a vocabulary of words from training texts, or MiniLM's word pieces."""

import importlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.errors import ConfigError, DataError
from models.pretrained import minilm_file
from simulation.data.dataset import read_packed

PAD = 0
UNKNOWN = 1
"""Token ids of padding and of words outside a vocabulary."""

# A run of letters and digits, or one other sign.
_WORD = re.compile(r"\w+|[^\w\s]")


def read_lines(path: Path) -> list[str]:
    """Read the lines of a UTF-8 text file, without their ends.

    If it does not exist, read the file with ``.gz`` added to its name.

    Raises:
        DataError: the file is missing or damaged.
    """
    try:
        lines = read_packed(path).decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"cannot read {path}: {error}") from error
    # A line break at the end of the file does not begin another line.
    if not lines[-1]:
        lines.pop()
    return [line.rstrip("\r") for line in lines]


def split_words(text: str) -> list[str]:
    """Split a text into lower-case words and single punctuation marks."""
    return _WORD.findall(text.lower())


@dataclass(frozen=True)
class Vocabulary:
    """The most frequent words of some texts; id 0 is padding, id 1 any other word.

    Example:
        >>> words = Vocabulary.from_texts(["a cat", "a dog", "a cat!"], size=4)
        >>> words.encode(["A dog sat"], length=5)
        array([[2, 1, 1, 0, 0]])
    """

    ids: Mapping[str, int]

    @classmethod
    def from_texts(cls, texts: Iterable[str], size: int) -> "Vocabulary":
        """Build a vocabulary of the most frequent words; ties are ordered alphabetically.

        Args:
            texts: texts whose words are counted.
            size: number of ids, with those of padding and unknown words.

        Raises:
            ConfigError: the size leaves no id for a word.
        """
        if size < 3:
            raise ConfigError(f"a vocabulary of {size} ids has no id for words; use at least 3")
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(split_words(text))
        by_frequency = sorted(counts, key=lambda word: (-counts[word], word))
        kept = by_frequency[: size - 2]
        # Ids 0 and 1 are taken.
        ids = dict(zip(kept, range(2, size), strict=False))
        return cls(MappingProxyType(ids))

    def __len__(self) -> int:
        return len(self.ids) + 2

    def encode(self, texts: Sequence[str], length: int) -> NDArray[np.int64]:
        """Turn texts into ids, int64 [texts, length]; longer texts are cut, shorter ones padded."""
        encoded = np.full((len(texts), length), PAD, np.int64)
        for row, text in zip(encoded, texts, strict=True):
            words = split_words(text)[:length]
            for place, word in enumerate(words):
                row[place] = self.ids.get(word, UNKNOWN)
        return encoded


def encode_pieces(texts: Sequence[str], length: int) -> NDArray[np.int64]:
    """Turn texts into ids of MiniLM's word pieces between its start and end symbols.

    Returns:
        int64 [texts, length].

    Raises:
        ConfigError: the tokenizers library or the MiniLM package is missing.
    """
    encoded = _tokenizer(length).encode_batch(list(texts))
    ids = [encoding.ids for encoding in encoded]
    # Without texts, no row determines the length.
    return np.array(ids, np.int64).reshape(len(texts), length)


def _tokenizer(length: int) -> Any:
    try:
        library: Any = importlib.import_module("tokenizers")
    except ModuleNotFoundError as error:
        raise ConfigError("word pieces need the tokenizers library; install shoal[text]") from error
    tokenizer = library.Tokenizer.from_file(str(minilm_file("tokenizer.json")))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length, pad_id=PAD)
    return tokenizer
