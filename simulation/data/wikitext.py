"""WikiText-2 in the batches of HeteroFL's masked language model, or for models of the next word.

Specification 1.8 has the former, 2.5 the latter.

Merity, Xiong, Bradbury, Socher: "Pointer sentinel mixture models", ICLR 2017. A client holds one
row of consecutive text and trains on one chunk of it at a time.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.errors import ConfigError, DataError
from simulation.data.dataset import Dataset, dataset_folder, evenly
from simulation.data.text import read_lines

Target = Literal["hidden", "next"]
"""The label of a token: the token itself, which may be hidden in the sample, or the next one."""

UNKNOWN_TOKEN = 0
END = 1
"""Token ids of unknown words and of the end of a line."""


def token_ids(lines: Iterable[str], known: Mapping[str, int]) -> NDArray[np.int64]:
    """Turn lines into one stream of the ids of their words, int64 [tokens].

    Each line ends with `END`.
    """
    ids: list[int] = []
    for line in lines:
        ids += [known.get(word, UNKNOWN_TOKEN) for word in line.split()]
        ids.append(known.get("<eos>", UNKNOWN_TOKEN))
    return np.array(ids, np.int64)


def chunks(
    stream: NDArray[np.int64], rows: int, length: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut a stream of tokens into equal rows of consecutive text, and each row into chunks.

    A short last chunk of a row is dropped, because a graph has a fixed length; the released code
    also trains on it.

    Returns:
        The chunks, int64 [rows * chunks, length], row after row, and the row of each, int64 [rows *
        chunks].

    Raises:
        ConfigError: a row is shorter than one chunk.
    """
    if rows < 1 or length < 1 or len(stream) // rows < length:
        raise ConfigError(
            f"{len(stream)} tokens are too few for {rows} rows with chunks of {length}; use"
            " fewer rows"
        )
    row = len(stream) // rows
    count = row // length
    # The end of each row that does not fill a chunk is dropped.
    table = stream[: rows * row].reshape(rows, row)[:, : count * length]
    return table.reshape(rows * count, length), np.repeat(np.arange(rows, dtype=np.int64), count)


def mask_tokens(
    tokens: NDArray[np.int64],
    rate: float,
    symbol: int,
    seed: int,
) -> NDArray[np.int64]:
    """Replace each token by the mask symbol with some probability.

    Args:
        tokens: int64, of any shape.
        rate: the probability.
        symbol: id of the mask symbol.
        seed: seed of the draw.

    Returns:
        New tokens of the same shape, int64.
    """
    hidden = np.random.default_rng(seed).random(tokens.shape) < rate
    return np.where(hidden, symbol, tokens)


def wikitext2(  # noqa: PLR0913  (options by keyword)
    root: Path | None,
    *,
    train: Literal["train", "validation"] = "train",
    rows: int = 100,
    test_rows: int = 10,
    test_chunks: int | None = None,
    length: int = 64,
    mask_rate: float = 0.15,
    seed: int = 0,
    target: Target = "hidden",
) -> Dataset:
    """Load WikiText-2 for the zoo's language models.

    For the masked one, the labels are the tokens themselves, hidden or not. The model masks tokens
    of the training text, differently for each batch; this function masks those of the test text
    once. The vocabulary is that of the training text: index 0 for unknown tokens, 1 for the end of
    a line, then tokens in order of appearance. The mask symbol has the id after the last one. Test
    samples are ordered by chunk: the first chunks of all rows come before the second ones.

    For a model of the next word, the label of a token is the token behind it. Nothing is masked.

    Args:
        root: folder that holds ``wikitext2/``.
        train: file to train on; ``validation`` if ``wiki.train.tokens`` is missing. The vocabulary
            is then smaller, and results are not comparable with published ones.
        rows: number of rows of the training text, one per client; groups are the rows.
        test_rows: rows of the test text.
        test_chunks: largest number of chunks of each row of the test text, evenly spread; None for
            all.
        length: tokens of a sample.
        mask_rate: share of masked test tokens.
        seed: seed of the masked test tokens.
        target: ``hidden`` for the masked model (`transformer_mlm`), ``next`` for the next word
            (`next_word`).

    Returns:
        int64 [n, length] with labels of the same shape; `classes` is the size of the vocabulary.
        `tokens` is the same, and for the masked model one more, for the mask symbol.

    Raises:
        ConfigError: an option is out of range.
        DataError: a file is missing.
    """
    if train not in ("train", "validation"):
        raise ConfigError(
            f"WikiText-2 has no training part {train!r}; choose 'train' or 'validation'"
        )
    if target not in get_args(Target):
        raise ConfigError(f"WikiText-2 has no target {target!r}; choose 'hidden' or 'next'")
    folder = dataset_folder(
        root, "wikitext2", "wiki.train.tokens and wiki.test.tokens, gzipped or not"
    )
    lines = _read_training_lines(folder, train)
    vocabulary = _vocabulary(lines)
    # The last token of a chunk needs the one behind it as its label.
    chunk_length = length + 1 if target == "next" else length
    train_text, train_group = chunks(token_ids(lines, vocabulary), rows, chunk_length)
    test_stream = token_ids(read_lines(folder / "wiki.test.tokens"), vocabulary)
    test_text, test_group = chunks(test_stream, test_rows, chunk_length)
    order = _chunk_by_chunk(len(test_text) // test_rows, test_rows, test_chunks)
    test_text = test_text[order]
    words = len(vocabulary)
    if target == "next":
        train_x, train_y = _before_and_behind(train_text)
        test_x, test_y = _before_and_behind(test_text)
        tokens = words
    else:
        train_x = train_y = train_text
        # Masked once, so that every round is evaluated on the same text.
        test_x = mask_tokens(test_text, mask_rate, words, seed)
        test_y = test_text
        # One more than the labels: the mask symbol follows the vocabulary.
        tokens = words + 1
    return Dataset(
        "wikitext2",
        # The labels of training samples are the samples: the model itself masks them.
        train_x,
        train_y,
        test_x,
        test_y,
        classes=words,
        tokens=tokens,
        train_group=train_group,
        test_group=test_group[order],
    )


def _before_and_behind(text: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return all tokens of some chunks but the last, and for each the one behind it."""
    return np.ascontiguousarray(text[:, :-1]), np.ascontiguousarray(text[:, 1:])


def _read_training_lines(folder: Path, train: Literal["train", "validation"]) -> list[str]:
    if train == "validation":
        return read_lines(folder / "wiki.valid.tokens")
    try:
        return read_lines(folder / "wiki.train.tokens")
    except DataError as error:
        hint = "; train='validation' trains on the validation text instead"
        raise DataError(f"{error}{hint}") from error


def _vocabulary(lines: Iterable[str]) -> dict[str, int]:
    """Return the id of each word, in order of appearance."""
    # The files' own `<unk>` is a word like any other; id 0 is for words that training lacks.
    ids = {"<ukn>": UNKNOWN_TOKEN, "<eos>": END}
    for line in lines:
        for word in line.split():
            ids.setdefault(word, len(ids))
    return ids


def _chunk_by_chunk(count: int, rows: int, limit: int | None) -> NDArray[np.int64]:
    """Return the indices of chunks stored row by row, with the first chunks of all rows first.

    Args:
        count: chunks of a row.
        rows: how many rows there are.
        limit: chunks of each row at most; None for all.
    """
    starts = count * np.arange(rows)
    # A column of chunk numbers plus a row of starts: read line by line, the chunk changes last.
    return (evenly(count, limit)[:, np.newaxis] + starts).ravel()
