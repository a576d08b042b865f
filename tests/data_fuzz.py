"""``make fuzz``: data files changed at random, given to the readers of boards and servers.

    python -m tests.data_fuzz [--count 50000] [--seconds 300] [--seed 1]

A changed file is read, or refused by a DataError that names it. Anything else ends the run with
the bytes that did it.
"""

import argparse
import gzip
import io
import json
import random
import sys
import tempfile
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image
from pydantic import TypeAdapter

from fleet_protocol.data import DataConfig, load_data
from fleet_protocol.data.comparison import find_problems
from fleet_protocol.errors import DataError
from tests.fuzz import mutated

__all__ = ["KINDS", "Readings", "fuzz"]

HANG_SECONDS = 5.0  # of the processor; a reading takes a millisecond
MAIN = ("csv", "text", "npy", "npz", "png", "jpeg", "idx.gz")
"""Kinds that are changed unless others are named."""
_CONFIG = TypeAdapter(DataConfig)
_PNG_HEAD = 8  # bytes of the signature


@dataclass(frozen=True)
class Kind:
    """A kind of data file.

    Attributes:
        file: its name, within the folder.
        table: of the source.
        whole: the content of a whole file.
        unpacked: what `pack` makes a whole file of; a half of all files is changed there.
        pack: makes a file of changed content.
    """

    file: str
    table: dict[str, object]
    whole: bytes
    unpacked: bytes = b""
    pack: Callable[[bytes], bytes] | None = None


@dataclass
class Readings:
    """What came of the changed files.

    Attributes:
        refused: how many by kind.
        read: how many by kind.
        seconds: of all.
    """

    refused: Counter[str]
    read: Counter[str]
    seconds: float = 0.0


def _saved(save: Callable[..., object], *args: object, **named: object) -> bytes:
    buffer = io.BytesIO()
    save(buffer, *args, **named)
    return buffer.getvalue()


def _packed(content: bytes) -> bytes:
    """A gzip file that has the same bytes whenever it is made."""
    return gzip.compress(content, mtime=0)


def _in_archive(content: bytes) -> bytes:
    """An archive whose samples have the bytes of `content`."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        # Without a date of their own, members would have today's.
        archive.writestr(zipfile.ZipInfo("x.npy"), content, zipfile.ZIP_DEFLATED)
        archive.writestr(zipfile.ZipInfo("y.npy"), _saved(np.save, np.arange(4)))
    return buffer.getvalue()


def _with_sums(content: bytes) -> bytes:
    """A PNG whose checksums are right, so that what they guard is decoded."""
    parts = [content[:_PNG_HEAD]]
    at = _PNG_HEAD
    while at + 8 <= len(content):
        size = int.from_bytes(content[at : at + 4])
        body = content[at + 4 : at + 8 + size]
        parts += [content[at : at + 4], body, zlib.crc32(body).to_bytes(4)]
        at += 12 + size
    return b"".join(parts)


def _picture() -> Image.Image:
    generator = np.random.default_rng(1)
    return Image.fromarray(generator.integers(0, 256, (6, 5, 3), dtype=np.uint8))


def _exif() -> bytes:
    exif = Image.Exif()
    exif[274] = 6
    exif[270] = "a picture"
    return exif.tobytes()


def _kinds() -> dict[str, Kind]:
    x = np.linspace(0, 1, 24, dtype=np.float32).reshape(4, 2, 3)
    columns = "a,b,c,label\n"
    numbers = columns + "".join(f"{row},{row / 3:.4f},-{row}e-3,{row % 2}\n" for row in range(8))
    csv = numbers.encode()
    text = columns + "".join(
        f'{row},"{row},5",NA,{"cat" if row % 2 else "dog"}\n' for row in (1, 2)
    )
    idx = b"\0\0\x08\x03\0\0\0\x04\0\0\0\x02\0\0\0\x03" + bytes(range(24))
    table = {"kind": "csv"}
    texts = {**table, "missing": 0, "columns": ["a", "c"]}
    images = {"kind": "images", "path": "img"}
    pair = {"kind": "idx", "labels": "y.idx"}
    npy = _saved(np.save, x)
    npz = {"kind": "npz"}
    png = _saved(_picture().save, "PNG")
    kinds = {
        "csv": Kind("d.csv", table, csv),
        "csv.gz": Kind("d.csv.gz", table, _packed(csv), csv, _packed),
        "text": Kind("t.csv", texts, text.encode()),
        "npy": Kind("d.npy", {**npz, "y_path": "y.npy"}, npy),
        "npz": Kind("d.npz", npz, _in_archive(npy), npy, _in_archive),
        "idx": Kind("d.idx", pair, idx),
        "idx.gz": Kind("d.idx.gz", pair, _packed(idx), idx, _packed),
        "png": Kind("img/cat/1.png", images, png, png, _with_sums),
        "jpeg": Kind("img/cat/1.jpg", images, _saved(_picture().save, "JPEG", exif=_exif())),
        "list": Kind("list.csv", {**images, "targets": "list.csv"}, b"cat/1.ppm,1\ncat/2.ppm,0\n"),
    }
    for name in ("gif", "tiff", "webp", "bmp", "ppm"):
        kinds[name] = Kind(f"img/cat/1.{name}", images, _saved(_picture().save, name.upper()))
    return kinds


KINDS = _kinds()


class Ground:
    """A folder with a file of one kind, which is changed again and again.

    Args:
        folder: an empty one.
        kind: of the file.

    Attributes:
        path: of the file.
    """

    def __init__(self, folder: Path, kind: Kind) -> None:
        self.path = folder / kind.file
        self._kind = kind
        for place in (self.path.parent, folder / "img/cat"):
            place.mkdir(parents=True, exist_ok=True)
        np.save(folder / "y.npy", np.arange(4) % 2)
        (folder / "y.idx").write_bytes(b"\0\0\x08\x01\0\0\0\x04\0\1\0\1")
        if "targets" in kind.table:
            for name in ("1.ppm", "2.ppm"):
                (folder / "img/cat" / name).write_bytes(KINDS["ppm"].whole)
        table = {"path": kind.file, **kind.table, "bounds": {"bytes": 2**26}}
        self._config = _CONFIG.validate_python(table).resolved(folder)
        self.path.write_bytes(kind.whole)
        find_problems(load_data(self._config))

    def change(self, draw: random.Random, other: bytes, *, inside: bool) -> bytes:
        """Return the file with changes, before it was packed or after it."""
        if inside and self._kind.pack is not None:
            return self._kind.pack(mutated(self._kind.unpacked, other, draw))
        return mutated(self._kind.whole, other, draw)

    def is_read(self, data: bytes) -> bool:
        """Return whether a changed file is read; else it was refused by name.

        Raises:
            Exception: any other error.
        """
        self.path.write_bytes(data)
        start = time.thread_time()
        error_text = ""
        try:
            find_problems(load_data(self._config))
        except DataError as error:
            error_text = str(error)
        if error_text and str(self._config.path.parent) not in error_text:
            raise AssertionError(f"it names no file: {error_text}")
        if time.thread_time() - start > HANG_SECONDS:
            raise AssertionError(f"it took more than {HANG_SECONDS} s")
        return not error_text


def fuzz(
    count: int, seconds: float, seed: int, folder: Path, kinds: Sequence[str] = ()
) -> Readings:
    """Read changed files of each kind until there are enough of them, or the time is over.

    Args:
        count: readings of each kind.
        seconds: after which it ends.
        seed: of the changes.
        folder: an empty one for the files.
        kinds: those that are changed; all where empty.

    Raises:
        Exception: whatever a reader raised that is no DataError with the name of the file.
    """
    draw = random.Random(seed)
    readings = Readings(Counter(), Counter())
    began = time.monotonic()
    others = [kind.whole for kind in KINDS.values()]
    grounds = {name: Ground(folder / name, KINDS[name]) for name in kinds or KINDS}
    for number in range(count):
        if time.monotonic() - began > seconds:
            break
        for name, ground in grounds.items():
            data = ground.change(draw, draw.choice(others), inside=number % 2 == 1)
            try:
                is_read = ground.is_read(data)
            except BaseException:
                print(f"{name}: {data!r}", file=sys.stderr)
                raise
            tally = readings.read if is_read else readings.refused
            tally[name] += 1
    readings.seconds = time.monotonic() - began
    return readings


def main() -> None:
    """Print one line of JSON, and end with 1 where something was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50_000, help="readings of each kind")
    parser.add_argument("--seconds", type=float, default=300.0, help="after which a kind ends")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", default=MAIN)
    args = parser.parse_args()
    memory = "/dev/shm"
    parent = memory if Path(memory).is_dir() else None
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=parent) as folder, ProcessPoolExecutor() as processes:
        fuzz_kind = partial(fuzz, args.count, args.seconds, args.seed, Path(folder))
        parts = list(processes.map(fuzz_kind, [[kind] for kind in args.kinds]))
    readings = Readings(
        sum((part.refused for part in parts), Counter[str]()),
        sum((part.read for part in parts), Counter[str]()),
        time.monotonic() - began,
    )
    now = datetime.now(timezone.utc)
    print(
        json.dumps(
            {
                "date": f"{now:%Y-%m-%d}",
                "seed": args.seed,
                "refused": dict(readings.refused),
                "read": dict(readings.read),
                "seconds": round(readings.seconds),
            }
        )
    )


if __name__ == "__main__":
    main()
