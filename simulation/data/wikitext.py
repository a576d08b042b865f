"""WikiText-2 in the batches of HeteroFL's masked language model (specification 1.8).

Merity, Xiong, Bradbury, Socher: "Pointer sentinel mixture models", ICLR 2017. A client holds one
row of consecutive text and trains on one chunk of it at a time.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.errors import ConfigError, DataError
from simulation.data.dataset import Dataset, dataset_folder, evenly
from simulation.data.text import read_lines

UNKNOWN_TOKEN = 0
END = 1
"""Token ids of what the vocabulary lacks and of the end of a line."""


def token_ids(lines: Iterable[str], known: Mapping[str, int]) -> NDArray[np.int64]:
    """Turn lines into one stream of the ids of their words, int64 [tokens].

    Each line is closed by `END`.
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

    A last short chunk of a row is dropped, since a graph has one length; the released code trains
    on it too.

    Returns:
        The chunks, int64 [rows * chunks, length], row after row, and the row of each, int64 [rows *
        chunks].

    Raises:
        ConfigError: a row is shorter than one chunk.
    """
    if rows < 1 or length < 1 or len(stream) // rows < length:
        raise ConfigError(
            f"{len(stream)} tokens do not make {rows} rows with chunks of {length}; choose fewer"
            " rows"
        )
    row = len(stream) // rows
    count = row // length
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
        seed: of the draw.

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
) -> Dataset:
    """Load WikiText-2 for the zoo's masked language model.

    The labels are the tokens themselves, hidden or not. The model hides tokens of the training text
    by itself, anew for each batch; those of the test text are hidden here, once. The vocabulary is
    that of the training text: index 0 for unknown tokens, 1 for the end of a line, then tokens in
    order of appearance. The mask symbol has the id after the last one. Test samples stand chunk by
    chunk, the first of all rows before the second.

    Args:
        root: folder that holds ``wikitext2/``.
        train: which file to train on; ``validation`` where ``wiki.train.tokens`` is missing. The
            vocabulary is smaller then, and results do not compare with published ones.
        rows: rows of the training text, one for each client; groups are the rows.
        test_rows: rows of the test text.
        test_chunks: chunks of each row of the test text at most, evenly spread; None for all.
        length: tokens of a sample.
        mask_rate: share of test tokens hidden.
        seed: of the hidden test tokens.

    Returns:
        int64 [n, length] with labels of the same shape; `classes` is the size of the vocabulary and
        `tokens` one more, for the mask symbol.

    Raises:
        ConfigError: an option is out of range.
        DataError: a file is missing.
    """
    if train not in ("train", "validation"):
        raise ConfigError(
            f"WikiText-2 has no part {train!r} to train on; choose 'train' or 'validation'"
        )
    folder = dataset_folder(
        root, "wikitext2", "wiki.train.tokens and wiki.test.tokens, gzipped or not"
    )
    lines = _read_training_lines(folder, train)
    vocabulary = _vocabulary(lines)
    train_x, train_group = chunks(token_ids(lines, vocabulary), rows, length)
    test_stream = token_ids(read_lines(folder / "wiki.test.tokens"), vocabulary)
    test_y, test_group = chunks(test_stream, test_rows, length)
    order = _chunk_by_chunk(len(test_y) // test_rows, test_rows, test_chunks)
    test_y = test_y[order]
    return Dataset(
        "wikitext2",
        train_x,
        train_x,
        mask_tokens(test_y, mask_rate, len(vocabulary), seed),
        test_y,
        classes=len(vocabulary),
        tokens=len(vocabulary) + 1,
        train_group=train_group,
        test_group=test_group[order],
    )


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
    ids = {"<ukn>": UNKNOWN_TOKEN, "<eos>": END}
    for line in lines:
        for word in line.split():
            ids.setdefault(word, len(ids))
    return ids


def _chunk_by_chunk(count: int, rows: int, limit: int | None) -> NDArray[np.int64]:
    """Return the indices of chunks that stand row after row, the first of all rows first.

    Args:
        count: chunks of a row.
        rows: how many rows there are.
        limit: chunks of each row at most; None for all.
    """
    starts = count * np.arange(rows)
    return (evenly(count, limit)[:, np.newaxis] + starts).ravel()
