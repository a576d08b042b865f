"""Small files that unpack to a lot: each is refused by name, in bounded time and memory, with the
setting that allows it.
"""

import gzip
import os
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image
from pydantic import TypeAdapter

from fleet_protocol.data import DataConfig, load_data
from fleet_protocol.data import bounds as bounds_module
from fleet_protocol.data import files as files_module
from fleet_protocol.errors import ConfigError, DataError

MEBIBYTE = 2**20


def load(folder, **table):
    return load_data(TypeAdapter(DataConfig).validate_python(table).resolved(folder))


def chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def write_bomb(path, width, height):
    """A PNG of one colour; of 20,000 x 20,000 pixels it has 48 kB."""
    rows = zlib.compress(b"\0" * ((width // 8 + 1) * height), 9)
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    )


@pytest.mark.attack(
    "file",
    "An image of 48 kB unpacks to 20,000 x 20,000 pixels",
    "refused before it is unpacked; the error names the file",
    "2026-11-28",
)
@pytest.mark.parametrize(
    ("width", "height", "message"),
    [
        (20_000, 20_000, r"img/cat/1.png has more than 178,956,970 pixels, .* make it smaller"),
        (
            8_000,
            8_000,
            r"img/cat/1.png has 64,000,000 pixels or more, and the limit is 50,000,000: if the .*",
        ),
    ],
)
def test_an_image_has_at_most_so_many_pixels(tmp_path, width, height, message):
    """What it unpacks to is known before anything is unpacked."""
    write_bomb(tmp_path / "img/cat/1.png", width, height)
    tracemalloc.start()
    with pytest.raises(DataError, match=message):
        load(tmp_path, kind="images", path="img", size=[8, 8])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * MEBIBYTE


def test_a_large_image_is_read_where_the_setting_allows_it(tmp_path):
    """As the message says."""
    write_bomb(tmp_path / "img/cat/1.png", 64, 40)
    table = {"kind": "images", "path": "img", "size": [4, 4], "channels": 1}
    with pytest.raises(DataError, match=r"has 2,560 pixels or more, and the limit is 100"):
        load(tmp_path, **table, bounds={"pixels": 100})
    assert load(tmp_path, **table, bounds={"pixels": 2560}).x.shape == (1, 1, 4, 4)


def test_all_images_together_fit_into_memory(tmp_path):
    """They are counted after the first."""
    for number in range(50):
        write_bomb(tmp_path / f"img/cat/{number}.png", 64, 64)
    table = {"kind": "images", "path": "img", "channels": 1}
    with pytest.raises(
        DataError, match=r"img takes 204,800 bytes of memory or more, and 204,799 are a"
    ):
        load(tmp_path, **table, bounds={"bytes": 50 * 64 * 64 - 1})
    assert len(load(tmp_path, **table, bounds={"bytes": 50 * 64 * 64})) == 50


@pytest.mark.attack(
    "file",
    "An image is a PostScript file, for which Pillow would start a program",
    "refused; no program starts",
    "2026-11-28",
)
def test_no_program_is_run_for_an_image(tmp_path):
    """Pillow would run Ghostscript for PostScript, whatever the name of the file."""
    (tmp_path / "img/cat").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "img/cat/1.png", "EPS")
    with pytest.raises(DataError, match=r"1.png is not an image"):
        load(tmp_path, kind="images", path="img")


@pytest.mark.parametrize(
    "table", [{"kind": "images", "path": "img"}, {"kind": "csv", "path": "img/cat/1.png"}]
)
def test_a_pipe_is_no_file(tmp_path, table):
    """Reading it would not end."""
    (tmp_path / "img/cat").mkdir(parents=True)
    os.mkfifo(tmp_path / "img/cat/1.png")
    with pytest.raises(DataError, match=r"1.png does not exist, or is not a regular file"):
        load(tmp_path, **table)


def test_a_packed_idx_file_is_read_as_far_as_it_announces(tmp_path):
    """One that announces little and has much, and one that announces more than the memory."""
    (tmp_path / "y.idx").write_bytes(b"\0\0\x08\x01\0\0\0\x01\0")
    head = b"\0\0\x08\x02" + struct.pack(">II", 1, 4)
    table = {"kind": "idx", "path": "x.gz", "labels": "y.idx"}
    (tmp_path / "x.gz").write_bytes(gzip.compress(head + bytes(64 * MEBIBYTE)))
    tracemalloc.start()
    with pytest.raises(
        DataError, match=r"x.gz announces \[1, 4\] values of 1 bytes but contains more"
    ):
        load(tmp_path, **table)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * MEBIBYTE
    (tmp_path / "x.gz").write_bytes(gzip.compress(head[:4] + b"\xff" * 8))
    with pytest.raises(DataError, match=r"x.gz takes 18,446,744,065,119,617,025 bytes of memory"):
        load(tmp_path, **table)


@pytest.mark.attack(
    "file",
    "A data archive unpacks to more data than fits into memory",
    "refused with an error that names the file",
    "2026-11-28",
)
def test_what_an_archive_unpacks_to_is_bounded(tmp_path):
    """Its list of members says it, before anything is unpacked."""
    np.savez_compressed(tmp_path / "d.npz", x=np.zeros((4, MEBIBYTE), np.uint8), y=np.arange(4))
    assert (tmp_path / "d.npz").stat().st_size < MEBIBYTE / 100
    with pytest.raises(
        DataError, match=r"d.npz takes 4,\d+,\d+ bytes of memory or more, and 1,000,000 are"
    ):
        load(tmp_path, kind="npz", path="d.npz", bounds={"bytes": 1_000_000})
    assert len(load(tmp_path, kind="npz", path="d.npz")) == 4


def test_without_a_setting_samples_fit_into_free_memory(tmp_path, monkeypatch):
    """A board has less than a server."""
    np.savez_compressed(tmp_path / "d.npz", x=np.zeros((4, 1000), np.uint8), y=np.arange(4))
    monkeypatch.setattr(bounds_module, "free_bytes", lambda: 2000)
    with pytest.raises(
        DataError, match=r"d.npz takes 4,\d+ bytes of memory or more, and 2,000 are free now"
    ):
        load(tmp_path, kind="npz", path="d.npz")
    monkeypatch.setattr(bounds_module, "free_bytes", lambda: 0)  # a system that says nothing
    assert len(load(tmp_path, kind="npz", path="d.npz")) == 4


TABLES = {
    "values": (b"a,b,label\n" + b"1,2,0\n" * 100, {"bytes": 400}, r"takes 408 bytes of memory"),
    "lines": (
        b"a,label\n" + b"1,0\n" * 100,
        {"samples": 20},
        r"has 21 samples or more, and the limit",
    ),
    "empty lines": (b"a,label\n" + b"\n" * 100 + b"1,0\n", {"samples": 20}, r"has 21 samples"),
    "columns": (
        b"1," * 300 + b"\n",
        {"columns": 99},
        r"has 301 columns or more, and the limit is 99",
    ),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", TABLES)
def test_a_table_has_bounds(tmp_path, case, packed):
    """Of lines, columns and values; the message names the setting."""
    content, bounds, message = TABLES[case]
    (tmp_path / "d.csv").write_bytes(gzip.compress(content) if packed else content)
    (key,) = bounds
    with pytest.raises(DataError, match=rf"d.csv {message}.*set a larger bounds.{key} in \[data\]"):
        load(tmp_path, kind="csv", path="d.csv", bounds=bounds)


def test_a_line_without_end_does_not_fill_the_memory(tmp_path, monkeypatch):
    """A packed file of 64 kB may have one of 64 MB."""
    monkeypatch.setattr(files_module, "LONGEST_LINE", 100_000)
    (tmp_path / "d.csv").write_bytes(gzip.compress(b"a,label\n" + b" " * 64 * MEBIBYTE))
    tracemalloc.start()
    with pytest.raises(DataError, match=r"d.csv has a line of more than 100,000 characters"):
        load(tmp_path, kind="csv", path="d.csv")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * MEBIBYTE


def test_samples_are_bounded_for_every_kind(tmp_path):
    """Also those of a function."""
    np.savez(tmp_path / "d.npz", x=np.zeros((4, 2)), y=np.arange(4))
    (tmp_path / "mine.py").write_text(
        "import numpy as np\ndef f():\n    return np.zeros((4, 2)), np.arange(4)\n"
    )
    tables = ({"kind": "npz", "path": "d.npz"}, {"kind": "python", "entry_point": "mine.py:f"})
    for table in tables:
        with pytest.raises(
            DataError, match=r"has 4 samples or more, and the limit is 3.*larger bounds.samples"
        ):
            load(tmp_path, **table, bounds={"samples": 3})


def test_samples_that_do_not_fit_are_an_error_of_the_data(tmp_path, monkeypatch):
    """However little memory is left: no traceback."""
    np.savez(tmp_path / "d.npz", x=np.zeros((4, 2)), y=np.arange(4))

    def full(*_args, **_named):
        raise MemoryError

    monkeypatch.setattr("fleet_protocol.data.make_dataset", full)
    with pytest.raises(DataError, match=r"the samples of .*d.npz do not fit into memory"):
        load(tmp_path, kind="npz", path="d.npz")


def test_a_bound_that_is_none_is_refused():
    """A word that is misspelled must not leave a file unbounded."""
    with pytest.raises((ConfigError, ValueError), match="pixel"):
        TypeAdapter(DataConfig).validate_python(
            {"kind": "images", "path": "img", "bounds": {"pixel": 3}}
        )
