"""Data sources: what they read, and how they say that they cannot."""

import errno
import gzip
import os
import re
import struct
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pydantic import TypeAdapter, ValidationError

from fleet_protocol.data import DataConfig, load_data, make_dataset
from fleet_protocol.data.file_rows import FileRows
from fleet_protocol.data.tables import read_csv
from fleet_protocol.errors import ConfigError, DataError
from fleet_protocol.manifest import Manifest
from fleet_protocol.recipe_spec import LossSpec, OptimizerSpec, RecipeSpec

CONFIG = TypeAdapter(DataConfig)


def load(base, **table):
    return load_data(CONFIG.validate_python(table).resolved(base))


def idx_bytes(array: np.ndarray, code: int) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, code, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (6, 4, 5), dtype=np.uint8)


LABELS = np.array([0, 1, 2, 0, 1, 2], np.int64)


def test_npz(tmp_path, pixels):
    """Arrays come out as they went in, and become float32 batches that are scaled and
    normalised.
    """
    np.savez(tmp_path / "d.npz", images=pixels, labels=LABELS)
    data = load(
        tmp_path,
        kind="npz",
        path="d.npz",
        x_key="images",
        y_key="labels",
        shape=[1, 4, 5],
        scale=1 / 255,
        mean=0.5,
        std=0.25,
    )
    x, y = data.batch(np.array([4, 0]), "float32")
    assert data.x.dtype == np.uint8
    assert x.dtype == np.float32
    np.testing.assert_allclose(x, (pixels[[4, 0]][:, None] / 255 - 0.5) / 0.25, rtol=1e-5)
    assert y.tolist() == [1, 0]


def named(names=("image", "words"), targets=("label", "box")):
    """A model of two inputs and a loss of two targets, each of six and four, one and two
    numbers.
    """
    shapes = {"image": (1, 2, 3), "words": (4,)}
    sizes = {"label": 1, "box": 2}
    loss = LossSpec(
        name="both",
        target="float32",
        masked=False,
        metrics=("loss_sum",),
        parts={key: sizes[key] for key in targets},
    )
    made = model((10,), "float32", 3, (3,))
    return made.model_copy(
        update={
            "settings": {"input_shape": {name: shapes[name] for name in names}},
            "recipe": made.recipe.model_copy(update={"loss": loss}),
        }
    )


PARTS = {
    "image": np.arange(12, dtype=np.float64).reshape(2, 2, 3),
    "words": np.arange(8).reshape(2, 4),
    "label": np.array([2, 1]),
    "box": np.array([[0.5, 1], [2, 3]]),
}


def test_several_inputs_and_targets_are_rows_in_the_models_order(tmp_path):
    """Named arrays of a file or of the user's function, each flattened; the row itself will do as
    well.
    """
    np.savez(tmp_path / "d.npz", **PARTS)
    keys = {"x_key": ["image", "words"], "y_key": ["label", "box"]}
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "def f():\n"
        "    d = np.load(__file__.replace('mine.py', 'd.npz'))\n"
        "    return {k: d[k] for k in ('image', 'words')}, {k: d[k] for k in ('label', 'box')}\n"
    )
    x = np.array([[*range(6), *range(4)], [*range(6, 12), *range(4, 8)]], np.float32)
    y = np.array([[2, 0.5, 1], [1, 2, 3]], np.float32)
    tables = (
        {"kind": "npz", "path": "d.npz", **keys},
        {"kind": "python", "entry_point": "mine.py:f"},
    )
    for data in (*(load(tmp_path, **table) for table in tables), make_dataset("row", x, y)):
        taken, targets = data.fit_to(named()).batch(slice(None), "float32")
        np.testing.assert_array_equal(taken, x)
        np.testing.assert_array_equal(targets, y)
    data = load(tmp_path, **tables[0])
    with pytest.raises(
        DataError,
        match=r"d.npz has the inputs image \(6\), words \(4\); name words .*in this order",
    ):
        data.fit_to(named(("words", "image")))
    with pytest.raises(
        DataError, match=r"has the targets label \(1\), box \(2\); name box \(2\), label \(1\)"
    ):
        data.fit_to(named(targets=("box", "label")))
    with pytest.raises(DataError, match=r"has the inputs image \(6\), words \(4\); name one array"):
        data.fit_to(model((10,), "float32", 3))
    with pytest.raises(DataError, match="no array 'text'"):
        load(tmp_path, kind="npz", path="d.npz", x_key=["image", "text"], y_key="label")
    np.savez(tmp_path / "odd.npz", **PARTS | {"words": np.zeros((3, 4))})
    with pytest.raises(
        DataError, match=r"arrays of \{'image': 2, 'words': 3\} samples; all must have the same"
    ):
        load(tmp_path, kind="npz", path="odd.npz", **keys)


@pytest.mark.parametrize("most", [0, 2**20], ids=["in-the-file", "in-memory"])
def test_npy_pair_is_not_mapped(tmp_path, pixels, monkeypatch, most):
    """A small .npy file is read; of a large one the rows of a batch are, and its labels at once."""
    monkeypatch.setattr("fleet_protocol.data.file_rows.MEMORY_BYTES", most)
    monkeypatch.setattr("fleet_protocol.data.file_rows.MEMORY_SHARE", 0)
    np.save(tmp_path / "x.npy", pixels)
    np.save(tmp_path / "y.npy", LABELS.astype(np.uint8))
    data = load(tmp_path, kind="npz", path="x.npy", y_path="y.npy", shape=[1, 4, 5], limit=5)
    assert isinstance(data.x, np.ndarray if most else FileRows)
    assert not isinstance(data.x, np.memmap)
    assert data.y.dtype == np.int64
    x, y = data.batch(np.array([4, 0, 2, 3]), "float32")
    np.testing.assert_array_equal(x, pixels[[4, 0, 2, 3]][:, None])
    assert y.tolist() == [1, 0, 2, 0]


@pytest.mark.parametrize("pack", [lambda b: b, gzip.compress], ids=["plain", "gz"])
def test_idx(tmp_path, pixels, pack):
    """MNIST's format, packed or not, whatever the file is called."""
    (tmp_path / "x").write_bytes(pack(idx_bytes(pixels, 0x08)))
    (tmp_path / "y").write_bytes(pack(idx_bytes(LABELS.astype(np.uint8), 0x08)))
    data = load(tmp_path, kind="idx", path="x", labels="y", shape=[1, 4, 5])
    np.testing.assert_array_equal(data.x[:, 0], pixels)
    x, _ = data.batch(np.arange(6), "float32")
    assert x.max() <= 1


def test_images(tmp_path, pixels):
    """One folder per label, in order of the names; colour has its channels first."""
    for index, label in enumerate(LABELS):
        folder = tmp_path / "images" / f"label-{label}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[index]).save(folder / f"{index}.png")
    (tmp_path / "images" / "label-0" / "notes.txt").write_text("not an image")
    grey = load(tmp_path, kind="images", path="images", channels=1)
    assert (grey.x.shape, grey.y.tolist()) == ((6, 1, 4, 5), [0, 0, 1, 1, 2, 2])
    np.testing.assert_array_equal(grey.x[1, 0], pixels[3])
    colour = load(tmp_path, kind="images", path="images", size=[8, 6])
    assert colour.x.shape == (6, 3, 8, 6)
    named = load(
        tmp_path, kind="images", path="images", labels=["label-2", "label-1", "label-0", "label-9"]
    )
    assert named.y.tolist() == [0, 0, 1, 1, 2, 2]


def test_images_of_more_bits_are_refused_and_transparent_ones_are_on_white(tmp_path, pixels):
    """Pillow cuts 16 bits to white, and what an editor leaves transparent is black."""
    (tmp_path / "a").mkdir()
    for deep in (pixels[0].astype(np.uint16) * 257, pixels[0].astype(np.float32) / 255):
        Image.fromarray(deep).save(tmp_path / "a" / "0.tiff")
        with pytest.raises(
            DataError, match=r"0\.tiff has more than 8 bits a channel.*save its numbers as \.npz"
        ):
            load(tmp_path, kind="images", path=".", channels=1, labels=["a"])
    (tmp_path / "a" / "0.tiff").unlink()
    drawn = np.zeros((4, 5, 4), np.uint8)
    drawn[1, 2, 3] = 255
    Image.fromarray(drawn, "RGBA").save(tmp_path / "a" / "0.png")
    found = load(tmp_path, kind="images", path=".", channels=1, labels=["a"]).x[0, 0]
    assert (found == np.where(drawn[..., 3], 0, 255)).all()


def test_shape_mixes_no_axes(tmp_path):
    """It gives flat or squeezed samples their shape; channels last are another matter."""
    np.savez(tmp_path / "d.npz", x=np.zeros((2, 6, 5, 3)), y=[0, 1])
    with pytest.raises(
        DataError,
        match=r"\[6, 5, 3\]; `shape` \[3, 6, 5\] would mix.*with a function in `transforms`",
    ):
        load(tmp_path, kind="npz", path="d.npz", shape=[3, 6, 5])
    for shape in ([90], [1, 6, 5, 3], [30, 3]):
        assert load(tmp_path, kind="npz", path="d.npz", shape=shape).x.shape == (2, *shape)


def test_the_tables_of_other_systems(tmp_path):
    """Lines may end as on an old Mac; a quote that is never closed is named; without labels theirs
    are skipped.
    """
    (tmp_path / "mac.csv").write_bytes(b"\xef\xbb\xbfa,label\r1,0\r2,1\r")
    assert load(tmp_path, kind="csv", path="mac.csv").x.tolist() == [[1], [2]]
    (tmp_path / "open.csv").write_text('a,label\n"1,0\n' + "2,1\n" * 40_000)
    with pytest.raises(
        DataError, match=r"line 2 of .*open\.csv is not a row of a table .field larger"
    ):
        load(tmp_path, kind="csv", path="open.csv")
    (tmp_path / "d.csv").write_text("a,b,label\n1,2,0\n3,4,1\n")
    config = TypeAdapter(DataConfig).validate_python(
        {"kind": "csv", "path": tmp_path / "d.csv", "label_column": 2}, context={"base": tmp_path}
    )
    assert read_csv(config, labelled=False)[0].tolist() == [[1, 2], [3, 4]]


def test_csv(tmp_path):
    """Columns by name or number, with or without a header, packed or not."""
    text = "a,b,label,c\n1,2,0,3\n4,5,1,6\n\n7,8,2,9\n"
    (tmp_path / "d.csv").write_text(text)
    (tmp_path / "d.csv.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "bare.tsv").write_text("0\t1.5\t-2\n1\t3\t4e1\n")
    for name in ("d.csv", "d.csv.gz"):
        data = load(tmp_path, kind="csv", path=name)
        assert data.x.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
        assert data.y.tolist() == [0, 1, 2]
    chosen = load(tmp_path, kind="csv", path="d.csv", columns=["c", 0])
    assert chosen.x.tolist() == [[3, 1], [6, 4], [9, 7]]
    for columns in (["a", "label"], [0, -2]):
        with pytest.raises(
            DataError, match=r"column label is a label and is listed in `columns`.*remove it"
        ):
            load(tmp_path, kind="csv", path="d.csv", columns=columns)
    bare = load(tmp_path, kind="csv", path="bare.tsv", header=False, label_column=0, delimiter="\t")
    assert bare.x.tolist() == [[1.5, -2], [3, 40]]


def test_python_entry_point(tmp_path):
    """The user's own function gets its options and returns the arrays."""
    (tmp_path / "mine.py").write_text(
        "import numpy as np\ndef load(n):\n    return np.zeros((n, 3)), np.arange(n) % 2\n"
    )
    data = load(tmp_path, kind="python", entry_point="mine.py:load", options={"n": 4})
    assert (data.x.shape, data.y.tolist()) == ((4, 3), [0, 1, 0, 1])


BESIDE = {
    "a module": "from {beside} import half\n",
    "a dataclass": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Half:\n    by: float = 0.5\n"
        "def half(x):\n    return x * Half().by\n"
    ),
    "a module that imports another": "import {beside}_all\nhalf = {beside}_all.half\n",
}


@pytest.mark.parametrize("case", BESIDE)
def test_a_function_may_use_files_beside_it_and_dataclasses(tmp_path, case):
    """As a script may; also for functions that transform samples."""
    beside = f"beside_{abs(hash(tmp_path))}"
    (tmp_path / f"{beside}.py").write_text("def half(x):\n    return x / 2\n")
    (tmp_path / f"{beside}_all.py").write_text(f"from {beside} import half\n")
    (tmp_path / "mine.py").write_text(
        BESIDE[case].format(beside=beside)
        + "import numpy as np\n"
        + "def load():\n    return half(np.full((3, 2), 4.0)), np.arange(3)\n"
    )
    data = load(
        tmp_path, kind="python", entry_point="mine.py:load", transforms=[f"{tmp_path}/mine.py:half"]
    )
    assert data.x.tolist() == [[1, 1]] * 3


def test_two_files_of_one_name_beside_functions_are_refused(tmp_path):
    """Python would import the first for both, and samples of one board would be another's."""
    beside = f"twice_{abs(hash(tmp_path))}"
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        (tmp_path / place / f"{beside}.py").write_text(f"value = '{place}'\n")
        (tmp_path / place / "mine.py").write_text(
            f"import numpy as np\nimport {beside}\n"
            f"def load():\n    return np.full((2, 1), ord({beside}.value)), np.arange(2)\n"
        )
    assert load(tmp_path, kind="python", entry_point="a/mine.py:load").x[0, 0] == ord("a")
    with pytest.raises(
        DataError,
        match=rf"/b/{beside}.py and .*/a/{beside}.py have the same module name.*rename one",
    ):
        load(tmp_path, kind="python", entry_point="b/mine.py:load")


def test_a_file_named_like_a_module_without_a_file_is_no_conflict(tmp_path, monkeypatch):
    """Such a module was taken for the working folder, whose parent may have functions, too."""
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "mine.py").write_text(
            "import numpy as np\ndef load():\n    return np.ones((2, 1)), np.arange(2)\n"
        )
    (tmp_path / "b" / "sys.py").touch()
    (tmp_path / "a" / "below").mkdir()
    assert load(tmp_path, kind="python", entry_point="a/mine.py:load").x[0, 0] == 1
    monkeypatch.chdir(tmp_path / "a" / "below")
    assert load(tmp_path, kind="python", entry_point="b/mine.py:load").x[0, 0] == 1


def test_tokens_stay_whole_numbers():
    """A model of tokens gets int64, without scaling."""
    data = make_dataset(
        "tokens", np.array([[5, 0], [70000, 1]], np.int32), np.array([0, 1]), scale=0.5
    )
    data.fit_to(model((2,), "int64", 2))
    x, _ = data.batch(np.array([1]), "int64")
    assert (x.dtype, x.tolist()) == (np.int64, [[70000, 1]])


def test_negative_tokens_are_refused():
    """Padding by -1 was looked up from the end of a graph's table without a word."""
    data = make_dataset("tokens", np.array([[5, -1], [7, 1]]), np.array([0, 1]))
    with pytest.raises(
        DataError, match="samples in tokens have negative tokens; number them from 0"
    ):
        data.fit_to(model((2,), "int64", 2))
    data.fit_to(model((2,), "float32", 2))


def test_channels_with_one_mean_may_be_laid_flat():
    """As they are for a model of several inputs, whose samples have no channels any more."""
    data = make_dataset(
        "rgb", np.ones((2, 3, 2, 2), np.float32), np.array([0, 1]), mean=(0, 0, 0), std=(1, 1, 1)
    )
    flat = replace(data, x=data.x.reshape(2, -1))
    assert np.array_equal(flat.batch(slice(2), "float32")[0], np.ones((2, 12), np.float32))


def test_channels_have_their_own_mean():
    """A list of means and deviations goes along the first axis of a sample."""
    data = make_dataset(
        "rgb", np.ones((2, 3, 2, 2), np.float32), np.array([0, 1]), mean=(0, 1, 2), std=(1, 2, 4)
    )
    x, _ = data.batch(np.array([0]), "float32")
    assert x[0, :, 0, 0].tolist() == [1, 0, -0.25]
    with pytest.raises(DataError, match="mean has 2 values"):
        make_dataset("rgb", np.ones((2, 3, 2, 2), np.float32), np.array([0, 1]), mean=(0, 1))


BAD = {
    "missing file": ({"kind": "npz", "path": "no.npz"}, "no.npz does not exist"),
    "missing folder": ({"kind": "images", "path": "no"}, "data folder .*no does not exist"),
    "empty folder": (
        {"kind": "images", "path": "empty"},
        "empty is empty: expected <label>/<image>",
    ),
    "folder nobody named": (
        {"kind": "images", "path": "some", "labels": ["b"]},
        "has a folder 'a'",
    ),
    "not an image": (
        {"kind": "images", "path": "some"},
        r"broken.png is not an image in a supported format \(BMP, GIF",
    ),
    "wrong key": ({"kind": "npz", "path": "d.npz", "x_key": "z"}, r"no array 'z' \(it has x, y\)"),
    "npy without labels": ({"kind": "npz", "path": "x.npy"}, "`y_path`"),
    "pickled objects": ({"kind": "npz", "path": "objects.npz"}, "Python objects"),
    "first part of an npz": (
        {"kind": "npz", "path": "begun.npz"},
        "begun.npz is the beginning of an archive",
    ),
    "foreign npz": ({"kind": "npz", "path": "text.npz"}, "not a numpy file"),
    "no samples": ({"kind": "npz", "path": "none.npz"}, "none.npz is empty"),
    "lengths": ({"kind": "npz", "path": "lengths.npz"}, "3 samples but 2 labels"),
    "negative label": (
        {"kind": "npz", "path": "negative.npz", "classes": 3},
        "label -1 of sample 1 in .*negative.npz",
    ),
    "label too large": (
        {"kind": "npz", "path": "d.npz", "classes": 2},
        "label 2 of sample 2 .* outside 0 to 1",
    ),
    "not finite": (
        {"kind": "npz", "path": "nan.npz"},
        "sample 1 in .*nan.npz has a value that is not finite",
    ),
    "fractional label": (
        {"kind": "npz", "path": "half.npz", "classes": 3},
        "half.npz are not whole numbers",
    ),
    "shape": (
        {"kind": "npz", "path": "d.npz", "shape": [7]},
        r"shape \[4\], which cannot become `shape` \[7\]",
    ),
    "text in a table": ({"kind": "csv", "path": "text.csv"}, "line 3 of .*text.csv: .*'x'"),
    "short line": (
        {"kind": "csv", "path": "short.csv"},
        "line 2 of .*short.csv has 1 fields instead of 2",
    ),
    "no label column": (
        {"kind": "csv", "path": "nolabel.csv"},
        r"no column 'label' \(it has a, b\)",
    ),
    "header only": ({"kind": "csv", "path": "header.csv"}, "header.csv is empty"),
    "truncated idx": (
        {"kind": "idx", "path": "short.idx", "labels": "y.idx"},
        "short.idx announces",
    ),
    "truncated gz": (
        {"kind": "idx", "path": "short.gz", "labels": "y.idx"},
        "short.gz is not an IDX file, or is truncated",
    ),
    "foreign idx": (
        {"kind": "idx", "path": "text.npz", "labels": "y.idx"},
        "text.npz is not an IDX file",
    ),
    "missing entry": (
        {"kind": "python", "entry_point": "mine.py:other"},
        "mine.py has no function 'other'",
    ),
    "failing entry": (
        {"kind": "python", "entry_point": "mine.py:load"},
        "mine.py:load failed: ValueError: no card",
    ),
    "exit": (
        {"kind": "python", "entry_point": "mine.py:leave"},
        r"mine.py:leave failed: RuntimeError: it ends the process by sys.exit\(0\)",
    ),
    "exit of a transform": (
        {"kind": "npz", "path": "d.npz", "transforms": ["mine.py:leave"]},
        "mine.py:leave failed",
    ),
    "another encoding": ({"kind": "csv", "path": "latin.csv"}, "latin.csv is not UTF-8 .* 0xfc"),
    "two bytes a character": ({"kind": "csv", "path": "wide.csv"}, "wide.csv is not UTF-8 .* 0xff"),
    "another delimiter": ({"kind": "csv", "path": "semicolon.csv"}, 'set delimiter = ";"'),
    "tabs": ({"kind": "csv", "path": "tabs.csv"}, r'set delimiter = "\\t"'),
    "a column twice": (
        {"kind": "csv", "path": "text.csv", "columns": ["a", "a"]},
        "lists column a 2 times",
    ),
    "label is missing": ({"kind": "csv", "path": "gap.csv"}, "line 3 of .*gap.csv .* 'NA'"),
    "name in another encoding": ({"kind": "images", "path": "foreign"}, "not a name in UTF-8"),
    "wrong entry": (
        {"kind": "python", "entry_point": "mine.py:number"},
        "returned int; expected a pair",
    ),
}


@pytest.fixture(scope="module")
def bad_folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("bad")
    (base / "empty").mkdir()
    (base / "some" / "a").mkdir(parents=True)
    (base / "some" / "a" / "broken.png").write_text("no")
    x = np.zeros((3, 4), np.float32)
    y = np.arange(3)
    np.savez(base / "d.npz", x=x, y=y)
    (base / "begun.npz").write_bytes((base / "d.npz").read_bytes()[:200])
    np.save(base / "x.npy", x)
    np.savez(base / "objects.npz", x=np.array([{}, {}, {}], object), y=y)
    (base / "text.npz").write_text("hello, I am text")
    np.savez(base / "none.npz", x=x[:0], y=y[:0])
    np.savez(base / "lengths.npz", x=x, y=y[:2])
    np.savez(base / "negative.npz", x=x, y=np.array([0, -1, 1]))
    np.savez(base / "nan.npz", x=np.array([[0.0], [np.nan], [1]]), y=y)
    np.savez(base / "half.npz", x=x, y=np.array([0, 0.5, 1]))
    (base / "text.csv").write_text("a,label\n1,0\nx,1\n")
    (base / "short.csv").write_text("a,label\n1\n")
    (base / "nolabel.csv").write_text("a,b\n1,0\n")
    (base / "header.csv").write_text("a,label\n")
    whole = idx_bytes(np.zeros((3, 4), np.uint8), 0x08)
    (base / "short.idx").write_bytes(whole[:-1])
    (base / "short.gz").write_bytes(gzip.compress(whole)[:-9])
    (base / "y.idx").write_bytes(idx_bytes(np.zeros(3, np.uint8), 0x08))
    (base / "mine.py").write_text(
        "def load():\n    raise ValueError('no card')\ndef number():\n    return 3\n"
        "def leave(*samples):\n    raise SystemExit(0)\n"
    )
    (base / "latin.csv").write_bytes("a,label\n1,m\xfcll\n2,m\xf6ll\n".encode("latin-1"))
    (base / "wide.csv").write_bytes("a,label\n1,x\n".encode("utf-16"))
    (base / "semicolon.csv").write_text("a;label\n1;0\n")
    (base / "tabs.csv").write_text("a\tlabel\n1\t0\n")
    (base / "gap.csv").write_text("a,label\n1,cat\n2,NA\n")
    (base / "foreign" / os.fsdecode(b"\xff")).mkdir(parents=True)
    return base


@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_named(bad_folder, name):
    """Whatever is wrong, the message says where and what was expected."""
    table, message = BAD[name]
    with pytest.raises(DataError, match=message):
        load(bad_folder, **table)


def model(shape, dtype, classes, label_shape=(), **loss):
    """What a manifest says of samples and targets; nothing else of it is read."""
    recipe = RecipeSpec(optimizer=OptimizerSpec(name="sgd"), loss=LossSpec(**loss))
    return Manifest.model_construct(
        settings={},
        input_shape=shape,
        input_dtype=dtype,
        classes=classes,
        label_shape=label_shape,
        recipe=recipe,
    )


def test_targets_may_be_numbers(tmp_path):
    """From every reader; whole ones too, where the loss takes numbers, and then of any sign."""
    squares = {"name": "mean-squared-error", "target": "float32"}
    (tmp_path / "t.csv").write_text("a,b,y,z\n1,2,-0.5,3\n4,5,2,6\n")
    data = load(tmp_path, kind="csv", path="t.csv", label_column="y", columns=["a", "b"])
    assert data.fit_to(model((2,), "float32", 1, **squares)).y.tolist() == [-0.5, 2.0]
    with pytest.raises(DataError, match=r"masked-cross-entropy takes labels.*mean-squared-error"):
        data.fit_to(model((2,), "float32", 3))
    data = load(tmp_path, kind="csv", path="t.csv", label_columns=["y", "z"])
    assert data.x.tolist() == [[1, 2], [4, 5]]
    assert data.fit_to(model((2,), "float32", 2, (2,), **squares)).y.tolist() == [[-0.5, 3], [2, 6]]
    np.savez(tmp_path / "t.npz", x=np.zeros((2, 3)), y=np.array([-1, 5]))
    found = load(tmp_path, kind="npz", path="t.npz").fit_to(model((3,), "float32", 1, **squares)).y
    assert (found.dtype, found.tolist()) == (np.float32, [-1, 5])
    np.savez(tmp_path / "t.npz", x=np.zeros((2, 3)), y=np.array([0.5, np.nan]))
    with pytest.raises(DataError, match=r"target of sample 1 .* is not finite"):
        load(tmp_path, kind="npz", path="t.npz")
    (tmp_path / "mine.py").write_text(
        "import numpy as np\ndef f():\n    return np.zeros((2, 3)), np.array([0.25, 1])\n"
    )
    found = (
        load(tmp_path, kind="python", entry_point="mine.py:f")
        .fit_to(model((3,), "float32", 1, **squares))
        .y
    )
    assert found.tolist() == [0.25, 1.0]


def test_images_may_have_numbers_as_targets(tmp_path):
    """Named in a table beside them instead of sorted into folders."""
    for number in range(2):
        Image.new("L", (3, 2), 10 * number).save(tmp_path / f"{number}.png")
    (tmp_path / "targets.csv").write_text("1.png,0.5,2\n0.png,-1,3\n")
    data = load(tmp_path, kind="images", path=".", targets="targets.csv", channels=1)
    assert data.x[:, 0, 0, 0].tolist() == [10, 0]
    assert data.y.tolist() == [[0.5, 2], [-1, 3]]
    (tmp_path / "targets.csv").write_text("2.png,0.5\n")
    with pytest.raises(DataError, match=r"the data file .*/2.png does not exist"):
        load(tmp_path, kind="images", path=".", targets="targets.csv", channels=1)
    (tmp_path / "targets.csv").write_text("1.png,much\n")
    with pytest.raises(DataError, match=r"line 1 of .*targets.csv"):
        load(tmp_path, kind="images", path=".", targets="targets.csv", channels=1)


def test_several_labels_of_a_sample_are_no_tokens():
    """A multi-hot target is refused by a cross entropy, with what to do, and taken by the binary
    one.
    """
    data = make_dataset("d.npz", np.zeros((2, 4), np.float32), np.array([[1, 0, 1], [0, 0, 1]]))
    with pytest.raises(
        DataError,
        match="if several labels hold for a sample, export with --loss binary-cross-entropy",
    ):
        data.fit_to(model((4,), "float32", 3))
    binary = {"name": "binary-cross-entropy", "target": "float32", "bounds": (0, 1)}
    assert data.fit_to(model((4,), "float32", 3, (3,), **binary)).y.tolist() == [
        [1, 0, 1],
        [0, 0, 1],
    ]
    twos = make_dataset("d.npz", np.zeros((1, 4), np.float32), np.array([[2, 0, 1]]))
    with pytest.raises(DataError, match="lie in 0 to 2; binary-cross-entropy takes 0 to 1"):
        twos.fit_to(model((4,), "float32", 3, (3,), **binary))


def test_a_label_may_count_for_nothing():
    """The one that the loss ignores is handed over as -1; others must exist."""
    data = make_dataset(
        "d.npz", np.zeros((2, 4), np.float32), np.array([[[0, 255], [1, 2]], [[255, 255], [0, 0]]])
    )
    assert data.fit_to(model((4,), "float32", 3, (2, 2), ignored=255)).y.min() == -1
    with pytest.raises(DataError, match="label 255 of sample 0"):
        data.fit_to(model((4,), "float32", 3, (2, 2)))


def test_a_model_that_takes_other_samples(tmp_path):
    """Shape, labels and type are checked against the model of a task."""
    data = make_dataset("d.npz", np.zeros((3, 4), np.float32), np.arange(3))
    data.fit_to(model((4,), "float32", 3))
    with pytest.raises(
        DataError, match=re.escape("samples in d.npz have shape [4], but the model takes [1, 2, 2]")
    ):
        data.fit_to(model((1, 2, 2), "float32", 3))
    with pytest.raises(
        DataError, match=re.escape("label 2 of sample 2 in d.npz is outside 0 to 1")
    ):
        data.fit_to(model((4,), "float32", 2))
    with pytest.raises(DataError, match=r"label -1 of sample 0 in d.npz is outside 0 to 2"):
        make_dataset("d.npz", np.zeros((1, 4), np.float32), np.array([-1])).fit_to(
            model((4,), "float32", 3)
        )
    with pytest.raises(DataError, match="takes integer tokens"):
        data.fit_to(model((4,), "int64", 3))


def test_images_without_pillow_name_the_extra(tmp_path):
    """A board without Pillow learns what to install."""
    (tmp_path / "a").mkdir()
    code = (
        "import sys; sys.modules['PIL'] = None\n"
        "from pathlib import Path\n"
        "from fleet_protocol.data import ImagesData, load_data\n"
        f"load_data(ImagesData(path=Path({str(tmp_path)!r})))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert ConfigError.__name__ in done.stderr
    assert "pip install 'shoal[images]'" in done.stderr


def test_labels_of_an_own_loss_are_those_it_takes():
    """They travel as float32, and a graph would cut fractions off and read negative ones from the
    end.
    """
    wanted = model((3,), "float32", 3, name="focal", target="float32", whole={"": (0, 2, -100)})
    x = np.zeros((3, 3), np.float32)
    fine = make_dataset("d", x, np.array([2, -100, 0])).fit_to(wanted).y
    assert (fine.dtype, fine.tolist()) == (np.float32, [2, -100, 0])
    for label in (-1, 3, 0.5, 2.0**25):
        with pytest.raises(
            DataError, match=r"label \S+ of sample 1 in d is not a whole number from 0 to 2.*focal"
        ):
            make_dataset("d", x, np.array([2, label, 0])).fit_to(wanted)
    several = model(
        (3,),
        "float32",
        3,
        (3,),
        target="float32",
        parts={"box": 2, "label": 1},
        whole={"label": (0, 2)},
    )
    assert make_dataset("d", x, np.full((3, 3), [0.5, -9, 2])).fit_to(several).y[0].tolist() == [
        0.5,
        -9,
        2,
    ]
    with pytest.raises(DataError, match=r"label 9 of sample 0 .* for label"):
        make_dataset("d", x, np.full((3, 3), [0.5, -9, 9])).fit_to(several)


def test_numbers_that_a_type_does_not_hold_are_refused_or_stay_numbers():
    """Whole numbers beyond int64 are targets, not labels of another sign; what float32 does not
    hold is not finite.
    """
    x = np.zeros((2, 3))
    assert make_dataset("d", x, np.array([1e30, 2])).y.tolist() == [np.float32(1e30), 2]
    with pytest.raises(DataError, match="go up to 9223372036854775808, beyond int64"):
        make_dataset("d", x, np.array([2**63, 0], np.uint64))
    with pytest.raises(DataError, match="target of sample 0 in d is not finite as float32"):
        make_dataset("d", x, np.array([1e300, 0.5]))
    x[1, 2] = -1e39
    with pytest.raises(DataError, match="sample 1 in d has a value that is not finite as float32"):
        make_dataset("d", x, np.array([0, 1]))


def test_an_ignored_label_hides_no_other():
    """The sample that is named is the user's, and of several labels negative ones do not count here
    either.
    """
    wanted = model((3,), "float32", 3, ignored=255)
    with pytest.raises(DataError, match="label 9 of sample 2 in d"):
        make_dataset("d", np.zeros((3, 3)), np.array([255, 1, 9])).fit_to(wanted)
    places = model((3,), "float32", 3, (2,), ignored=255)
    assert make_dataset("d", np.zeros((1, 3)), np.array([[255, -7]])).fit_to(places).y.max() < 0


def test_a_damaged_table_and_ragged_samples_are_named(tmp_path):
    """An archive that ends early must not pass for an interrupt, which is how a command line takes
    its error.
    """
    for cut in (b"\x1f\x8bgarbage", gzip.compress(b"a,label\n" + b"1,0\n" * 99)[:-12]):
        (tmp_path / "t.csv").write_bytes(cut)
        with pytest.raises(
            DataError, match=r"t.csv is not a table, or is truncated or damaged: .*copy it again"
        ):
            load(tmp_path, kind="csv", path="t.csv")
    (tmp_path / "mine.py").write_text("def f():\n    return [[1, 2], [1]], [0, 1]\n")
    with pytest.raises(DataError, match=r"mine.py:f returned no arrays: .*one shape"):
        load(tmp_path, kind="python", entry_point="mine.py:f")


@pytest.mark.parametrize("kind", ["npz", "images"])
def test_a_path_that_nobody_may_look_at_is_named(tmp_path, monkeypatch, kind):
    """A home folder, say, that the agent's unit keeps it from; both agent and doctor had ended in a
    traceback.
    """

    def denied(_path):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "is_file", denied)
    monkeypatch.setattr(Path, "is_dir", denied)
    with pytest.raises(
        DataError, match=r"cannot access .*mine: Permission denied; give the agent's user"
    ):
        load(tmp_path, kind=kind, path="mine")


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.ones((2, 3)).astype("m8[s]"), np.zeros(2), r"samples in .*d\.npz are timedelta64"),
        (np.ones((2, 3)), np.zeros(2).astype("m8[s]"), r"labels in .*d\.npz are timedelta64"),
        (np.ones((2, 3), np.longdouble), np.zeros(2), "expected real numbers of at most 64 bits"),
        (np.ones((2, 0)), np.zeros(2), r"have shape \[0\], which holds no values"),
    ],
    ids=["times", "times to learn", "long numbers", "no columns"],
)
def test_arrays_that_cannot_be_samples_are_refused(tmp_path, x, y, message):
    """Numpy counts differences of times as integers, and a missing time as the least of them."""
    np.savez(tmp_path / "d.npz", x=x, y=y)
    with pytest.raises(DataError, match=message):
        load(tmp_path, kind="npz", path="d.npz")


def test_an_array_is_not_both_input_and_target(tmp_path):
    with pytest.raises(ValidationError, match="array 'x' is in x_key and in y_key"):
        load(tmp_path, kind="npz", path="d.npz", y_key="x")


def test_a_file_of_torch_save_is_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "d.npz", "w") as archive:
        archive.writestr("d/data.pkl", b"")
    with pytest.raises(DataError, match=r"is a file of torch\.save; .*numpy\.savez\(path"):
        load(tmp_path, kind="npz", path="d.npz")
