"""Texts become the ids a model expects: words, word pieces, and HeteroFL's chunks of WikiText-2."""

import gzip

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_protocol.errors import ConfigError, DataError
from simulation.data.datasets import load_dataset
from simulation.data.text import Vocabulary, encode_pieces, read_lines
from simulation.data.wikitext import chunks, mask_tokens, token_ids
from simulation.judges import perplexity
from tests.simulation.data_folder import FOLDER, needs, needs_minilm


def test_frequent_words_come_first():
    """Ids by frequency, then alphabet; 0 pads, 1 is any other word; case and spacing do not
    matter.
    """
    words = Vocabulary.from_texts(["b a b", "A, c!"], size=5)
    assert dict(words.ids) == {"a": 2, "b": 3, "!": 4}
    assert len(words) == 5
    assert words.encode(["B  c a", "", "a a a a a"], length=4).tolist() == [
        [3, 1, 2, 0],
        [0] * 4,
        [2] * 4,
    ]
    with pytest.raises(
        ConfigError, match="a vocabulary of 2 ids has no id for words; use at least 3"
    ):
        Vocabulary.from_texts(["a"], size=2)


@pytest.mark.parametrize(("name", "sizes"), [("sst2", (6920, 1821)), ("cola", (8551, 527))])
def test_sentences_have_their_published_sizes(name, sizes):
    """Both sets, as ids of a vocabulary of training words."""
    if not (FOLDER / name).is_dir():
        pytest.skip(f"{name} is not here; set SHOAL_DATA")
    data = load_dataset(name, FOLDER)
    assert (len(data.train_y), len(data.test_y)) == sizes
    assert data.input_shape == (32,)
    assert set(data.train_y) == set(data.test_y) == {0, 1}
    assert 1 <= data.train_x[:, 0].min() <= data.train_x.max() < data.tokens == 2000


@needs("sst2")
@needs("cola")
def test_other_parts_can_be_tested_on():
    """The development parts; an unknown one is an error."""
    assert len(load_dataset("sst2", FOLDER, test="dev").test_y) == 872
    inside, outside, both = (
        load_dataset("cola", FOLDER, test=part) for part in ("in_domain", "out_of_domain", "dev")
    )
    assert len(outside.test_y) == 516
    np.testing.assert_array_equal(both.test_x, np.concatenate([inside.test_x, outside.test_x]))
    np.testing.assert_array_equal(both.test_y, np.concatenate([inside.test_y, outside.test_y]))
    with pytest.raises(ConfigError, match="or both: 'dev'"):
        load_dataset("cola", FOLDER, test="train")
    with pytest.raises(ConfigError, match="choose 'test' or 'dev'"):
        load_dataset("sst2", FOLDER, test="train")
    with pytest.raises(ConfigError, match="choose 'words' or 'minilm'"):
        load_dataset("cola", FOLDER, tokens="letters")


@pytest.mark.parametrize("content", ["good film\t2\n", "no tab\n", "\n", "a\tb\t1\n"])
def test_malformed_sentences_are_refused(tmp_path, content):
    """A label that is none, a missing column, an empty file: the error names the file."""
    (tmp_path / "sst2").mkdir()
    for stem in ("train", "test"):
        (tmp_path / "sst2" / f"{stem}.tsv").write_text(content)
    with pytest.raises(DataError, match=r"train\.tsv"):
        load_dataset("sst2", tmp_path)


@needs_minilm
def test_word_pieces_are_those_of_bert():
    """Start and end symbols, lower case, pieces of rare words; cut and padded to the length."""
    ids = encode_pieces(["Hello embeddings", "a b c d e f g h i j"], length=7)
    assert ids.tolist() == [
        [101, 7592, 7861, 8270, 4667, 2015, 102],
        [101, 1037, 1038, 1039, 1040, 1041, 102],
    ]
    assert encode_pieces(["hello"], length=5).tolist() == [[101, 7592, 102, 0, 0]]


@needs_minilm
@needs("sst2")
def test_a_set_can_be_read_in_word_pieces():
    """SST-2 for the pre-trained encoder."""
    data = load_dataset("sst2", FOLDER, tokens="minilm", length=48)
    assert data.tokens == 30522
    assert data.input_shape == (48,)
    assert set(data.train_x[:, 0]) == {101}


def test_lines_are_read_packed_or_not(tmp_path):
    """The same lines from a text and from its gzip file, whatever unusual characters they hold."""
    text = "a b\n\nc\u2028d\r\ne\n"
    (tmp_path / "plain.txt").write_bytes(text.encode())
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(text.encode()))
    lines = ["a b", "", "c\u2028d", "e"]
    assert read_lines(tmp_path / "plain.txt") == read_lines(tmp_path / "packed.txt") == lines
    packed = bytearray(gzip.compress(text.encode() * 99))
    packed[12:20] = bytes(8)  # no longer what gzip's own error is for
    for name, content in (("cut", b"\x1f\x8b cut"), ("changed", packed)):
        (tmp_path / f"{name}.txt.gz").write_bytes(content)
        with pytest.raises(
            DataError, match=rf"{name}\.txt\.gz is not a gzip file, or is .*damaged"
        ):
            read_lines(tmp_path / f"{name}.txt")
    with pytest.raises(DataError, match=r"cannot read \S+missing\.txt or missing\.txt\.gz"):
        read_lines(tmp_path / "missing.txt")


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 9))
def test_chunks_are_consecutive_text(tokens, rows, length):
    """A row is a run of the stream, a chunk a run of its row; only what is short of a chunk is
    lost.
    """
    stream = np.arange(tokens)
    if tokens // rows < length:
        with pytest.raises(ConfigError, match="use fewer rows"):
            chunks(stream, rows, length)
        return
    pieces, owners = chunks(stream, rows, length)
    each = tokens // rows
    expected = [
        list(range(row * each + place, row * each + place + length))
        for row in range(rows)
        for place in range(0, each - length + 1, length)
    ]
    assert pieces.tolist() == expected
    assert owners.tolist() == np.repeat(np.arange(rows), each // length).tolist()


@needs("wikitext2")
def test_wikitext_validation_can_stand_for_training():
    """217,646 tokens in 100 rows of 34 chunks; a vocabulary of the text; test tokens hidden, labels
    not.
    """
    with pytest.raises(DataError, match="train='validation' trains on the validation text"):
        load_dataset("wikitext2", FOLDER)
    data = load_dataset("wikitext2", FOLDER, train="validation")
    assert data.train_x.shape == data.train_y.shape == (100 * (2176 // 64), 64)
    assert data.test_x.shape == data.test_y.shape == (10 * (24556 // 64), 64)
    assert data.tokens == data.classes + 1
    assert data.train_x.min() == 1
    assert data.train_x.max() == data.classes - 1
    hidden = data.test_x == data.classes
    assert abs(hidden.mean() - 0.15) < 0.003
    np.testing.assert_array_equal(data.test_x[~hidden], data.test_y[~hidden])
    assert data.test_y.max() < data.classes
    assert set(data.train_group) == set(range(100))


def test_a_vocabulary_is_that_of_the_training_text(tmp_path):
    """Ids in order of appearance after the unknown token and the end of a line; test words may be
    unknown.
    """
    folder = tmp_path / "wikitext2"
    folder.mkdir()
    (folder / "wiki.train.tokens").write_text(" = a = \n \n b <unk> a\n")
    (folder / "wiki.test.tokens").write_text("b z\nc\n")
    data = load_dataset("wikitext2", tmp_path, rows=1, test_rows=1, length=5, mask_rate=0.0)
    assert data.train_x.tolist() == [[2, 3, 2, 1, 1]]
    assert data.test_x.tolist() == [[4, 0, 1, 0, 1]]
    assert (data.classes, data.tokens) == (6, 7)
    assert token_ids(["x"], {}).tolist() == [0, 0]


def test_the_next_word_is_the_label(tmp_path):
    """Each token's label is the one behind it, also at the end of a chunk; nothing is masked."""
    folder = tmp_path / "wikitext2"
    folder.mkdir()
    (folder / "wiki.train.tokens").write_text("a b c d e f")
    (folder / "wiki.test.tokens").write_text("b a d")
    data = load_dataset("wikitext2", tmp_path, rows=1, test_rows=1, length=2, target="next")
    assert data.train_x.tolist() == [[2, 3], [5, 6]]
    assert data.train_y.tolist() == [[3, 4], [6, 7]]
    assert data.test_x.tolist() == [[3, 2]]
    assert data.test_y.tolist() == [[2, 5]]
    assert data.tokens == data.classes == 8
    assert data.train_group.tolist() == [0, 0]
    with pytest.raises(ConfigError, match="no target 'nxt'"):
        load_dataset("wikitext2", tmp_path, target="nxt")


def test_test_samples_stand_chunk_by_chunk(tmp_path):
    """All rows' first chunk, then their second; fewer chunks are whole ones of all rows."""
    folder = tmp_path / "wikitext2"
    folder.mkdir()
    (folder / "wiki.train.tokens").write_text(" ".join("abcdefgh"))
    (folder / "wiki.test.tokens").write_text(" ".join("abcdefgh"))
    data = load_dataset("wikitext2", tmp_path, rows=1, test_rows=2, length=2, mask_rate=0.0)
    assert data.test_y.tolist() == [
        [2, 3],
        [6, 7],
        [4, 5],
        [8, 9],
    ]  # rows of the text: a to d, e to h
    assert data.test_group.tolist() == [0, 1, 0, 1]
    short = load_dataset(
        "wikitext2", tmp_path, rows=1, test_rows=2, length=2, mask_rate=0.0, test_chunks=1
    )
    assert short.test_y.tolist() == [[2, 3], [6, 7]]


def test_masks_and_perplexity():
    """Masks depend on the seed alone; the perplexity averages over chunks, not over tokens."""
    tokens = np.zeros((100, 64), np.int64)
    masked = mask_tokens(tokens, 0.15, 7, seed=3)
    assert set(masked.ravel()) == {0, 7}
    np.testing.assert_array_equal(mask_tokens(tokens, 0.15, 7, seed=3), masked)
    assert perplexity(np.log([2.0, 6.0])) == pytest.approx(4.0)
