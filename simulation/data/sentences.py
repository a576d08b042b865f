"""Labelled sentences: SST-2 (positive or not) and CoLA (grammatical or not).

Socher et al.: "Recursive deep models for semantic compositionality over a sentiment treebank",
EMNLP 2013. Warstadt, Singh, Bowman: "Neural network acceptability judgments", TACL 2019.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.errors import ConfigError, DataError
from models.pretrained import MINILM_VOCAB
from simulation.data.dataset import Dataset, dataset_folder
from simulation.data.text import Vocabulary, encode_pieces, read_lines

Tokens = Literal["words", "minilm"]
_Labelled = tuple[list[str], NDArray[np.int64]]


def sst2(
    root: Path | None,
    *,
    tokens: Tokens = "words",
    length: int = 32,
    vocab: int = 2000,
    test: Literal["test", "dev"] = "test",
) -> Dataset:
    """Load SST-2 from tab-separated files of sentence and label.

    Args:
        root: folder that holds ``sst2/``.
        tokens: ``words`` for a vocabulary built from the training sentences, ``minilm`` for its
            word pieces.
        length: tokens of a sentence.
        vocab: token ids of a vocabulary of words.
        test: the part to test on.

    Returns:
        int64 [n, length], 2 classes: 6,920 sentences to train on, 1,821 (test) or 872 (dev) to test
        on.

    Raises:
        ConfigError: an option is unknown, or word pieces lack their packages.
        DataError: a file is missing or damaged.
    """
    if test not in ("test", "dev"):
        raise ConfigError(f"SST-2 has no test part {test!r}; choose 'test' or 'dev'")
    folder = dataset_folder(root, "sst2", "train.tsv.gz, dev.tsv.gz and test.tsv.gz")
    sides = [_read(folder / f"{stem}.tsv", columns=2, text=0, label=1) for stem in ("train", test)]
    return _encoded("sst2", sides, tokens, length, vocab)


def cola(
    root: Path | None,
    *,
    tokens: Tokens = "words",
    length: int = 32,
    vocab: int = 2000,
    test: Literal["in_domain", "out_of_domain", "dev"] = "in_domain",
) -> Dataset:
    """Load CoLA from tab-separated files of source, label, the author's mark and sentence.

    Args:
        root: folder that holds ``cola/``.
        tokens: as in `sst2`.
        length: tokens of a sentence.
        vocab: token ids of a vocabulary of words.
        test: the development part to test on, or ``dev`` for both, as in GLUE; the labels of the
            test parts are not public.

    Returns:
        int64 [n, length], 2 classes: 8,551 sentences to train on, 527 (in-domain), 516 or 1,043
        (dev) to test on.

    Raises:
        ConfigError: an option is unknown, or word pieces lack their packages.
        DataError: a file is missing or damaged.
    """
    both = ("in_domain", "out_of_domain")
    if test not in (*both, "dev"):
        raise ConfigError(
            f"CoLA has no test part {test!r}; choose 'in_domain', 'out_of_domain' or both: 'dev'"
        )
    folder = dataset_folder(
        root,
        "cola",
        "in_domain_train.tsv.gz, in_domain_dev.tsv.gz, out_of_domain_dev.tsv.gz",
    )
    train = _read(folder / "in_domain_train.tsv", columns=4, text=3, label=1)
    texts: list[str] = []
    labels: list[NDArray[np.int64]] = []
    for domain in both if test == "dev" else (test,):
        domain_texts, domain_labels = _read(
            folder / f"{domain}_dev.tsv", columns=4, text=3, label=1
        )
        texts += domain_texts
        labels.append(domain_labels)
    return _encoded("cola", (train, (texts, np.concatenate(labels))), tokens, length, vocab)


def _read(
    path: Path,
    *,
    columns: int,
    text: int,
    label: int,
) -> _Labelled:
    texts = []
    labels = []
    for number, line in enumerate(read_lines(path), 1):
        if not line:
            continue
        cells = line.split("\t")
        if len(cells) != columns or cells[label] not in ("0", "1"):
            raise DataError(
                f"{path}, line {number}: expected {columns} columns, with the label 0 or 1 in"
                f" column {label + 1}"
            )
        texts.append(cells[text])
        labels.append(int(cells[label]))
    if not texts:
        raise DataError(f"{path} contains no sentences")
    return texts, np.array(labels, np.int64)


def _encoded(
    name: str,
    parts: Sequence[_Labelled],
    tokens: Tokens,
    length: int,
    vocab: int,
) -> Dataset:
    """Return the training and the test part as token ids; the options are those of `sst2`."""
    train, test = parts
    if tokens not in ("words", "minilm") or length < 1:
        raise ConfigError(
            f"{name}: cannot create {length} tokens of kind {tokens!r}; choose 'words' or 'minilm'"
        )
    if tokens == "minilm":
        train_x = encode_pieces(train[0], length)
        test_x = encode_pieces(test[0], length)
        ids = MINILM_VOCAB
    else:
        # Test words that do not occur in training are unknown, as for a model in use.
        words = Vocabulary.from_texts(train[0], vocab)
        train_x = words.encode(train[0], length)
        test_x = words.encode(test[0], length)
        ids = len(words)
    return Dataset(name, train_x, train[1], test_x, test[1], 2, tokens=ids)
