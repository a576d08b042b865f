"""Rows of a file: the same as numpy's for every index, an error where the file is cut short, and no
mapping.
"""

import gc
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fleet_protocol.data.file_rows import FileRows, read_npy, unmapped
from fleet_protocol.errors import DataChangedError

DTYPES = [np.uint8, np.dtype(">i4"), np.int64, np.float16, np.float32, np.bool_]
SHAPES = arrays.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=7)
SAME_FOLDER = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100
)


@pytest.fixture(autouse=True)
def nothing_in_memory(monkeypatch):
    """Every file counts as large."""
    monkeypatch.setattr("fleet_protocol.data.file_rows.MEMORY_BYTES", -1)
    monkeypatch.setattr("fleet_protocol.data.file_rows.MEMORY_SHARE", -1)


def in_file(folder: Path, values: np.ndarray) -> FileRows:
    np.save(folder / "x.npy", values)
    rows = read_npy(folder / "x.npy")
    assert isinstance(rows, FileRows)
    return rows


def counted(shape: tuple[int, ...], dtype: object) -> np.ndarray:
    """Values that are all different, as far as the type has as many."""
    return np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)


@SAME_FOLDER
@given(data=st.data(), shape=SHAPES, dtype=st.sampled_from(DTYPES))
def test_slices_numbers_and_new_axes(tmp_path, data, shape, dtype):
    """Whatever numpy calls a basic index gives what numpy gives."""
    values = counted(shape, dtype)
    index = data.draw(arrays.basic_indices(shape, allow_newaxis=True))
    picked = in_file(tmp_path, values)[index]
    np.testing.assert_array_equal(picked, values[index])
    assert picked.dtype == values[index].dtype


@SAME_FOLDER
@given(
    data=st.data(),
    shape=arrays.array_shapes(min_dims=1, max_dims=3, max_side=7),
    dtype=st.sampled_from(DTYPES),
)
def test_arrays_of_numbers(tmp_path, data, shape, dtype):
    """Arrays of numbers of any shape, negative ones too, for the rows or for several axes."""
    values = counted(shape, dtype)
    index = data.draw(arrays.integer_array_indices(shape))
    rows = in_file(tmp_path, values)
    np.testing.assert_array_equal(rows[index], values[index])
    np.testing.assert_array_equal(rows[index[0]], values[index[0]])
    np.testing.assert_array_equal(
        rows[index[0].ravel().tolist()], values[index[0].ravel().tolist()]
    )


@SAME_FOLDER
@given(data=st.data(), shape=arrays.array_shapes(min_dims=1, max_dims=3, max_side=7))
def test_masks(tmp_path, data, shape):
    """A mask over the rows, or over several axes."""
    values = counted(shape, np.int64)
    dims = data.draw(st.integers(1, len(shape)))
    mask = data.draw(arrays.arrays(np.bool_, shape[:dims]))
    np.testing.assert_array_equal(in_file(tmp_path, values)[mask], values[mask])


@pytest.mark.parametrize(
    "index", [7, -8, np.array([0, 7]), np.array([-8]), [7], "x", 1.5, np.array([0.5])]
)
def test_an_index_that_is_none_is_numpys_error(tmp_path, index):
    """Rows that do not exist and things that are no index."""
    rows = in_file(tmp_path, counted((7, 2), np.float32))
    with pytest.raises(IndexError):
        rows[index]


def test_an_array_has_numpys_attributes(tmp_path):
    """Shape, type, sizes, other shapes of its rows, and all of it as an array."""
    values = counted((6, 2, 3), np.float32)
    rows = in_file(tmp_path, values)
    assert (rows.shape, rows.ndim, rows.size, rows.nbytes, len(rows)) == ((6, 2, 3), 3, 36, 144, 6)
    np.testing.assert_array_equal(np.asarray(rows), values)
    assert np.asarray(rows, np.float64).dtype == np.float64
    np.testing.assert_array_equal(rows.reshape(6, -1)[[4, 1]], values.reshape(6, -1)[[4, 1]])
    np.testing.assert_array_equal(rows.reshape(6, 3, 2)[-1], values.reshape(6, 3, 2)[-1])
    np.testing.assert_array_equal(rows.head(4)[::-1], values[3::-1])
    assert len(rows.head(100)) == 6
    for shape in [(3, 12), (6, 5), (6, 2)]:
        with pytest.raises(ValueError, match=r"cannot (become|reshape)"):
            rows.reshape(*shape)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(), (5,), (0, 4), (5, 3, 2)])
def test_every_npy_file_is_read(tmp_path, order, shape):
    """Also without dimensions, and with values that lie column by column."""
    values = np.asarray(counted(shape, np.int16), order=order)
    np.save(tmp_path / "x.npy", values)
    np.testing.assert_array_equal(np.asarray(read_npy(tmp_path / "x.npy")), values)


def test_a_file_that_is_cut_short_is_an_error(tmp_path):
    """A row that is gone is named with its file; those that are left can be read. A mapping would
    end the process.
    """
    values = counted((3000, 100), np.float64)
    rows = in_file(tmp_path, values)
    os.truncate(tmp_path / "x.npy", 128 + 1500 * 800)
    np.testing.assert_array_equal(rows[:1500], values[:1500])
    with pytest.raises(DataChangedError, match=r"x.npy is shorter than when .*rename"):
        rows[np.array([3, 1500])]
    with pytest.raises(ValueError, match="its array needs 2400128: it was only partly copied"):
        read_npy(tmp_path / "x.npy")


def is_open(folder: Path) -> bool:
    """Whether this process has a file of a folder open."""
    links = [entry.readlink() for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return any(link.is_relative_to(folder) for link in links)


def test_another_file_of_the_name_changes_nothing(tmp_path):
    """What was opened stays readable when a new file takes its name, and is closed when nobody
    holds it.
    """
    values = counted((50, 4), np.float32)
    rows = in_file(tmp_path, values).reshape(50, 2, 2)
    np.save(tmp_path / "new.npy", values[:5] + 1)
    (tmp_path / "new.npy").rename(tmp_path / "x.npy")
    np.testing.assert_array_equal(rows[[49]], values[[49]].reshape(1, 2, 2))
    assert is_open(tmp_path)
    del rows
    gc.collect()
    assert not is_open(tmp_path)


def views(path: Path) -> list[np.ndarray]:
    """Parts of a mapped file as a function of the user's may return them."""
    mapped = np.load(path, mmap_mode="r")
    with path.open("rb") as file:
        raw = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return [
        mapped,
        mapped[2:],
        np.asarray(mapped)[:, 1:],
        mapped[::-2],
        mapped.transpose(0, 2, 1),
        mapped[3:5].reshape(2, -1),
        mapped[:, None],
        np.frombuffer(raw, np.float32, offset=128),
        np.load(path, mmap_mode="c"),
    ]


@pytest.mark.parametrize("number", range(9))
@pytest.mark.parametrize("large", [True, False])
def test_no_part_of_a_mapping_is_left(tmp_path, monkeypatch, number, large):
    """Arrays that show a mapped file become reads of that file, or copies; the file may be cut
    short afterwards.
    """
    monkeypatch.setattr("fleet_protocol.data.file_rows.MEMORY_BYTES", 0 if large else 2**20)
    monkeypatch.setattr("fleet_protocol.data.file_rows.MEMORY_SHARE", 0)
    values = counted((8, 3, 4), np.float32)
    np.save(tmp_path / "x.npy", values)
    view = views(tmp_path / "x.npy")[number]
    expected = np.array(view)
    found = unmapped(view)
    del view
    np.testing.assert_array_equal(np.asarray(found), expected)
    if not isinstance(found, FileRows):
        os.truncate(tmp_path / "x.npy", 10)
        np.testing.assert_array_equal(found, expected)
    assert isinstance(found, FileRows) == (large and number in {0, 1, 5, 6})


def test_an_array_in_memory_stays_itself():
    """Nothing is copied that is mapped nowhere."""
    values = counted((4, 3), np.float32)
    assert unmapped(values) is values
    part = values[1:]
    assert unmapped(part) is part
