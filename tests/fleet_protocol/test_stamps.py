"""Files of data that change are noticed, whatever they are of and however they change; half of one
is not taken.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pydantic import TypeAdapter

from fleet_protocol.data import DataConfig, DataSet, load_data
from fleet_protocol.data.augment import user_function
from fleet_protocol.data.stamps import stamps_of
from fleet_protocol.errors import DataChangedError, DataError

PYTHON = (
    "import numpy as np\ndef load(path): return np.ones((4, 2)), np.arange(4)\ndef same(x): "
    "return x\n"
)
TABLES = {
    "npz": {"kind": "npz", "path": "d.npz"},
    "npy": {"kind": "npz", "path": "x.npy", "y_path": "y.npy"},
    "csv": {"kind": "csv", "path": "d.csv"},
    "idx": {"kind": "idx", "path": "x.idx", "labels": "y.idx"},
    "images": {"kind": "images", "path": "images"},
    "listed": {"kind": "images", "path": "images", "targets": "t.csv"},
    "python": {"kind": "python", "entry_point": "own.py:load", "options": {"path": "helper.bin"}},
    "transforms": {"kind": "npz", "path": "d.npz", "transforms": ["own.py:same"]},
    "augment": {"kind": "npz", "path": "d.npz", "augment": ["own.py:same"]},
}
FILES = {
    "npz": ["d.npz"],
    "npy": ["x.npy", "y.npy"],
    "csv": ["d.csv"],
    "idx": ["x.idx", "y.idx"],
    "images": ["images/a/0.png", "images/b/1.png"],
    "listed": ["images/a/0.png", "t.csv"],
    "python": ["own.py", "helper.bin"],
    "transforms": ["d.npz", "own.py"],
    "augment": ["own.py"],
}
EACH_FILE = [(kind, name) for kind, names in FILES.items() for name in names]


@pytest.fixture
def folder(tmp_path) -> Path:
    """Every kind of source, with four samples of two values."""
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    y = np.array([0, 1, 0, 1])
    np.savez(tmp_path / "d.npz", x=x, y=y)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    (tmp_path / "d.csv").write_text("a,b,label\n1,2,0\n3,4,1\n5,6,0\n7,8,1\n")
    (tmp_path / "x.idx").write_bytes(bytes([0, 0, 8, 2, 0, 0, 0, 4, 0, 0, 0, 2, *range(8)]))
    (tmp_path / "y.idx").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 4, 0, 1, 0, 1]))
    for label in "ab":
        (tmp_path / "images" / label).mkdir(parents=True)
        for index in range(2):
            Image.new("L", (2, 2), 50 * index).save(tmp_path / "images" / label / f"{index}.png")
    (tmp_path / "t.csv").write_text("a/0.png,0.5\nb/1.png,0.7\n")
    (tmp_path / "own.py").write_text(PYTHON)
    (tmp_path / "helper.bin").write_bytes(b"12345678")
    return tmp_path


def load(folder: Path, kind: str, **changes: object) -> DataSet:
    return load_data(
        TypeAdapter(DataConfig).validate_python(TABLES[kind] | changes).resolved(folder)
    )


def rewrite(path: Path) -> None:
    """The same size, in place, with another byte at the end."""
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.write(data[:-1] + bytes([data[-1] ^ 1]))


def rewrite_at_its_old_time(path: Path) -> None:
    before = path.stat()
    rewrite(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\n")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def put_another(path: Path) -> None:
    """Another file of the same size and time takes its name."""
    before = path.stat()
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(path)


CHANGES: list[Callable[[Path], None]] = [
    rewrite,
    rewrite_at_its_old_time,
    append,
    cut,
    put_another,
    Path.unlink,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize(("kind", "name"), EACH_FILE)
def test_each_file_of_a_source_counts(folder, kind, name, change):
    """Every kind of change of every file is found, and found by name; before it there is none."""
    data = load(folder, kind)
    assert data.changes() == ()
    change(folder / name)
    shown = "images" if name.startswith("images/") else name
    assert str(folder / shown) in data.changes()
    # Of an image its folder is named, and if it was new the image; without the table it lists no
    # image.
    assert {*data.changes()} <= {str(folder / shown), str(folder / name), str(folder / "images")}
    with pytest.raises(
        DataChangedError, match=f"{shown}.* changed after it was read; write new data beside"
    ):
        data.check_unchanged()


def test_images_and_folders_that_come_and_go_count(folder):
    """One more, one less, one that moved to another label, an empty folder, one image in a folder
    below.
    """
    images = folder / "images"
    moves = [
        lambda: Image.new("L", (2, 2)).save(images / "a" / "9.png"),
        lambda: (images / "a" / "9.png").rename(images / "b" / "9.png"),
        (images / "b" / "9.png").unlink,
        (images / "c").mkdir,
        (images / "a" / "deep").mkdir,
        lambda: Image.new("L", (2, 2)).save(images / "a" / "deep" / "0.png"),
    ]
    for move in moves:
        data = load(folder, "images", size=[2, 2])
        move()
        assert data.changes()[0] == str(images)


def test_what_is_no_part_of_a_source_does_not_count(folder):
    """A log among the images, a file beside the data, an image that the table does not list."""
    images, listed, rows = (load(folder, kind) for kind in ("images", "listed", "npz"))
    (folder / "images" / "a" / "notes.txt").write_text("new")
    (folder / "other.npz").write_bytes(b"")
    rewrite(folder / "images" / "b" / "0.png")
    assert (listed.changes(), rows.changes()) == ((), ())
    assert images.changes()[0] == str(folder / "images")  # for the image alone


def test_links_are_followed_and_may_lead_back(folder):
    """A folder that links to itself ends, and what a link leads to counts."""
    (folder / "images" / "a" / "back").symlink_to(folder / "images")
    (folder / "elsewhere.png").write_bytes((folder / "images" / "a" / "0.png").read_bytes())
    (folder / "images" / "a" / "link.png").symlink_to(folder / "elsewhere.png")
    config = TypeAdapter(DataConfig).validate_python(TABLES["images"]).resolved(folder)
    stamps = stamps_of(config)
    assert stamps.changes(stamps.current()) == ()
    rewrite(folder / "elsewhere.png")
    assert stamps.changes(stamps.current())[0] == str(folder / "images")


def test_a_file_system_whose_times_are_coarse_hides_nothing_that_follows_at_once(folder):
    """FAT knows every second second: of a file that was just written the content counts, too."""
    stamps = load(folder, "npz").stamps
    rewrite(folder / "d.npz")
    later = replace(stamps.current(), files=stamps.files)  # as that file system would say
    assert stamps.changes(later) == (str(folder / "d.npz"),)


def test_an_old_file_is_not_read_to_look_whether_it_changed(folder, monkeypatch):
    """A gigabyte is not read before and after each task."""
    monkeypatch.setattr("fleet_protocol.data.stamps.YOUNG_SECONDS", -1e6)
    assert not load(folder, "npz").stamps.young


TEARING = """
from pathlib import Path
def tear(x):
    folder = Path(__file__).parent
    left = int((folder / "left").read_text())
    if left:
        (folder / "left").write_text(str(left - 1))
        {act}
    return x
"""


def test_labels_that_are_replaced_after_the_samples_were_read_are_read_with_them(folder):
    """What a job writes between the two files is no pair; the pair that it leaves is taken."""
    (folder / "tear.py").write_text(
        TEARING.format(
            act="import numpy as np; np.save(folder / 'y.npy', np.array([2, 2, 2, left]))"
        )
    )
    (folder / "left").write_text("2")
    data = load(folder, "npy", transforms=["tear.py:tear"])
    assert data.y.tolist() == [2, 2, 2, 1]
    assert data.changes() == ()


@pytest.mark.parametrize("kind", ["npy", "npz", "csv", "idx", "images"])
def test_a_source_that_does_not_come_to_rest_is_refused(folder, kind):
    """A file that is written to as often as it is read is not finished."""
    name = "images/a/0.png" if kind == "images" else FILES[kind][0]
    (folder / "tear.py").write_text(TEARING.format(act=f"(folder / '{name}').touch()"))
    (folder / "left").write_text("100")
    shown = "images" if kind == "images" else name
    with pytest.raises(
        DataChangedError, match=rf"{shown}.* changed during each of 3 .* still being written; write"
    ):
        load(folder, kind, transforms=["tear.py:tear"])
    assert (folder / "left").read_text() == "97"


def test_an_error_of_a_file_that_rests_is_itself(folder):
    """What is damaged and stays so is not called changed, and is not read three times."""
    (folder / "d.npz").write_bytes(b"PK nothing")
    with pytest.raises(DataError, match="beginning of an archive") as error:
        load(folder, "npz")
    assert not isinstance(error.value, DataChangedError)


def test_a_function_is_read_again_with_its_file(folder):
    """The next reading runs the file as it is now, and one that is gone is named."""
    name = f"{folder / 'own.py'}:load"
    assert len(user_function(name)("")[0]) == 4
    assert user_function(name) is user_function(name)
    (folder / "own.py").write_text(PYTHON.replace("(4, 2)", "(11, 2)"))
    assert len(user_function(name)("")[0]) == 11
    (folder / "own.py").unlink()
    with pytest.raises(DataError, match=r"own\.py does not exist"):
        user_function(name)
