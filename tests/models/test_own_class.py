"""The description of a user's class as somebody else may have written it: refused by file and
entry, in time.
"""

import json
import os
import time

import numpy as np
import pytest
from safetensors.numpy import save

from fleet_protocol.errors import BlobError
from models.own_class import OWN_CLASS, Builder, Entry, OwnClass, read_own_class

WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)
TENSORS = {
    "a.weight": WEIGHT,
    "b.weight": np.ones((2, 4), np.float32),
    "scale": np.ones((), np.float32),
    "none": np.zeros((0, 3), np.float32),
    "stat.n.mean": np.zeros(3, np.float32),
    "stat.n.var": np.ones(3, np.float32),
}
BUILDER = {"module": "my_models", "name": "net"}


def written(folder, entries=(), constants=None, **fields):
    """A file with a description that nobody has checked."""
    header = json.dumps({"entries": list(entries), **fields})
    (folder / OWN_CLASS).write_bytes(save(dict(constants or {}), {"own_class": header}))
    return folder


DAMAGED = {
    "a mean of nothing": {"name": "m", "kind": "mean"},
    "a variance of two": {"name": "v", "kind": "variance", "sources": ["n", "n"]},
    "a parameter of nothing": {"name": "p", "kind": "parameter"},
    "vectors of nothing": {"name": "u", "kind": "left"},
    "vectors of two": {"name": "u", "kind": "right", "sources": ["a.weight", "a.weight"], "dim": 1},
    "a 99th dimension": {"name": "u", "kind": "left", "sources": ["a.weight"], "dim": 99},
    "a dimension below 0": {"name": "u", "kind": "left", "sources": ["a.weight"], "dim": -1},
    "a mean with a dimension": {"name": "m", "kind": "mean", "sources": ["n"], "dim": 1},
    "a count of something": {"name": "c", "kind": "count", "sources": ["a.weight"]},
    "a count that is not there": {"name": "c", "kind": "count"},
    "a constant that is not there": {"name": "k", "kind": "constant"},
    "a parameter of 20,000": {"name": "p", "kind": "parameter", "sources": ["a.weight"] * 20_000},
    "a name with an escape": {"name": "\x1b[2J", "kind": "parameter", "sources": ["a.weight"]},
    "an endless name": {"name": "p" * 30_000, "kind": "parameter", "sources": ["a.weight"]},
    "half a letter": {"name": "\ud800", "kind": "parameter", "sources": ["a.weight"]},
    "an unknown kind": {"name": "p", "kind": "code", "sources": ["a.weight"]},
}


@pytest.mark.parametrize("case", DAMAGED)
def test_an_entry_that_does_not_fit_its_kind_is_refused(case, tmp_path):
    """When the file is read; the message names the file and the entry, on one line that moves no
    cursor.
    """
    sound = {"name": "w", "kind": "parameter", "sources": ["a.weight"]}
    with pytest.raises(BlobError) as caught:
        read_own_class(written(tmp_path, [sound, DAMAGED[case]]))
    said = str(caught.value)
    assert OWN_CLASS in said
    assert said.isprintable()
    assert len(said) < 2000
    if case != "half a letter":
        assert "entries.1" in said or "entry '" in said


def test_two_entries_of_one_name_are_refused(tmp_path):
    """One of them would be lost."""
    entry = {"name": "w", "kind": "parameter", "sources": ["a.weight"]}
    with pytest.raises(BlobError, match=r"own_class\.safetensors: .*two entries are 'w'"):
        read_own_class(written(tmp_path, [entry, entry]))


UNMADE = {
    "columns that differ": Entry(name="e", kind="parameter", sources=("a.weight", "b.weight")),
    "numbers of no dimension": Entry(name="e", kind="parameter", sources=("scale", "scale")),
    "vectors of a number": Entry(name="e", kind="left", sources=("scale",)),
    "a dimension that is not there": Entry(name="e", kind="right", sources=("a.weight",), dim=2),
    "vectors of nothing": Entry(name="e", kind="left", sources=("none",)),
}


@pytest.mark.parametrize("case", UNMADE)
def test_an_entry_that_does_not_fit_the_run_is_refused(case):
    """Where its values are made; the message names the entry."""
    with pytest.raises(BlobError, match="entry 'e', a "):
        OwnClass(entries=(UNMADE[case],)).values(TENSORS, {}, 1)


@pytest.mark.attack(
    "file",
    "The description of a class declares terabytes of state",
    "refused; the error names the entry",
    "2026-11-28",
)
@pytest.mark.parametrize("kind", ["parameter", "left"])
def test_a_state_is_not_far_larger_than_the_run(kind):
    """A few bytes of description make no gigabytes, and no hours of work; weights that layers share
    are no bomb.
    """
    shared = [Entry(name=f"e{number}", kind=kind, sources=("big",)) for number in range(20_000)]
    tensors = {"big": np.ones((1000, 1000), np.float32)}
    began = time.monotonic()
    with pytest.raises(BlobError, match=r"entry 'e64': .*64 times"):
        OwnClass(entries=tuple(shared)).values(tensors, {}, 1)
    assert time.monotonic() - began < 5
    if kind == "parameter":
        assert len(OwnClass(entries=tuple(shared[:64])).values(tensors, {}, 1)) == 64


def header_only(dtype, count):
    """A file of safetensors with one tensor of a type."""
    entry = {"dtype": dtype, "shape": [2], "data_offsets": [0, count]}
    header = json.dumps({"__metadata__": {"own_class": "{}"}, "k": entry}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(count)


FILES = {
    "BF16": header_only("BF16", 4),
    "a type of no name": header_only("[[]]", 4),
    "no bytes": b"",
    "half a file": save({"k": WEIGHT}, {"own_class": "{}"})[:-5],
    "a description of brackets": save({}, {"own_class": "[" * 100_000}),
    "a header of brackets": (100_000).to_bytes(8, "little") + b"[" * 100_000,
    "no description": save({"k": WEIGHT}),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_cannot_be_read_is_refused(case, tmp_path):
    """With its name and what to do, whatever is wrong with it."""
    (tmp_path / OWN_CLASS).write_bytes(FILES[case])
    with pytest.raises(BlobError, match=r"own_class\.safetensors.*run `shoal export` again"):
        read_own_class(tmp_path)


@pytest.mark.parametrize("way", ["a link out", "a pipe", "nothing"])
def test_the_file_lies_in_the_set(way, tmp_path):
    """A link to a file of the machine is not followed, and a pipe holds up nobody."""
    folder = tmp_path / "tier"
    folder.mkdir()
    if way == "a link out":
        (folder / OWN_CLASS).symlink_to(written(tmp_path) / OWN_CLASS)
    elif way == "a pipe":
        os.mkfifo(folder / OWN_CLASS)
    with pytest.raises(BlobError, match=r"own_class\.safetensors is (not read|missing)"):
        read_own_class(folder)


def test_constants_of_every_type_come_back(tmp_path):
    """What PyTorch has as buffers, masks among them; a count goes on from its constant, in its
    type.
    """
    constants = {
        "mask": np.array([True, False]),
        "small": np.arange(3, dtype=np.int16),
        "usual": np.arange(3, dtype=np.int32),
        "complex": np.ones(2, np.complex64),
        "seen": np.array(250, np.uint8),
    }
    entries = [Entry(name=name, kind="constant") for name in constants if name != "seen"]
    own = OwnClass(entries=(*entries, Entry(name="seen", kind="count")))
    (tmp_path / OWN_CLASS).write_bytes(own.to_bytes(constants))
    again, found = read_own_class(tmp_path)
    assert again == own
    values = again.values({}, found, 10)
    for entry in entries:
        np.testing.assert_array_equal(values[entry.name], constants[entry.name])
        assert values[entry.name].dtype == constants[entry.name].dtype
    assert values["seen"].dtype == np.uint8
    assert values["seen"] == 4


STRANGE = {
    "code for a module": {"module": "os; import evil"},
    "a line end in a module": {"module": "my_models\nimport evil"},
    "a module of dots": {"module": "..evil"},
    "a keyword for a module": {"module": "my.import"},
    "code for a name": {"name": "net; print(1)"},
    "a line end in a name": {"name": "net\nprint(1)"},
    "a star for a name": {"name": "*"},
    "a line end in a file": {"file": "/tmp/x\nprint(1)\n.py"},
    "another line end in a file": {"file": "/tmp/x\u2028print(1).py"},
    "an endless file": {"file": "/" + "x" * 30_000},
}


@pytest.mark.parametrize("case", STRANGE)
def test_a_builder_is_names_and_no_code(case, tmp_path):
    """What a set says becomes lines of Python that a user runs: only names of Python go into
    them.
    """
    with pytest.raises(BlobError, match=r"own_class\.safetensors: builder\."):
        read_own_class(written(tmp_path, builder={**BUILDER, **STRANGE[case]}))
    sound = {**BUILDER, "module": "my.größe", "file": "/home/me/größe (2).py"}
    assert read_own_class(written(tmp_path, builder=sound))[0].builder == Builder(**sound)
