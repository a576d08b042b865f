"""Writing an image to a card: only to a whole, removable, unmounted disk that is large enough, and
read back.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fleet_protocol.errors import ConfigError, StorageError

_CHUNK = 4 << 20


@dataclass(frozen=True)
class Disk:
    """A disk that may be written over: where it is, what it calls itself, and its size in bytes."""

    path: Path
    model: str
    size: int


def find_disk(path: Path, need: int, system: Path = Path("/")) -> Disk:
    """A disk, such as ``/dev/sdb``, that an image of so many bytes may be written to.

    Raises:
        ConfigError: it is no disk, a part of one, built in, in use, or too small.
    """
    known = system / "sys/class/block"
    about = known / path.resolve().name
    if not about.is_dir() or (system == Path("/") and path.resolve().parent != Path("/dev")):
        found = sorted(each.name for each in known.glob("*") if _removable(each))
        raise ConfigError(
            f"{path} is no disk; those that can be taken out are: {', '.join(found) or 'none'}"
        )
    if (about / "partition").exists():
        raise ConfigError(
            f"{path} is a part of a disk; name the whole one: /dev/{about.resolve().parent.name}"
        )
    if not _removable(about):
        raise ConfigError(
            f"{path} is built in, not a card: its data would be lost; write the image with --out instead"
        )
    parts = {about.name, *(each.parent.name for each in about.glob("*/partition"))}
    rows = [
        line.split()
        for name in ("proc/self/mounts", "proc/swaps")
        for line in _text(system / name).splitlines()
    ]
    used = sorted({row[0] for row in rows if row and row[0].removeprefix("/dev/") in parts})
    used += sorted(each.name for name in parts for each in (known / name / "holders").glob("*"))
    if used:
        raise ConfigError(
            f"{path} is in use ({', '.join(used)}): umount it first, for example: umount {used[0]}"
        )
    size = int(_text(about / "size") or 0) * 512
    if size < need:
        raise ConfigError(
            f"{path} holds {size / 1e9:.1f} GB, and the image {need / 1e9:.1f}: is a card in it? take a larger one"
        )
    return Disk(
        path,
        _text(about / "device/model") or _text(about / "device/name") or "without a name",
        size,
    )


def write_image(
    image: Path,
    disk: Path,
    told: Callable[[str, int, int], None] = lambda _what, _done, _all: None,
) -> None:
    """Write an image to a disk of `find_disk` and read it back.

    It tells what it does ("writing", "reading back"), how many bytes of it are done, and of how
    many.

    Raises:
        StorageError: it cannot be written, or does not hold what was written.
    """
    size = image.stat().st_size
    try:
        # O_EXCL: the kernel refuses a disk that is mounted, also where its name is another.
        with os.fdopen(os.open(disk, os.O_RDWR | os.O_EXCL), "r+b", buffering=0) as target:
            for start, data in _chunks(image):
                view = memoryview(data)
                while view:
                    view = view[target.write(view) or 0 :]
                told("writing", start + len(data), size)
            os.fsync(target.fileno())
            os.posix_fadvise(target.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            target.seek(0)
            for start, data in _chunks(image):
                if target.read(len(data)) != data:
                    raise StorageError(
                        f"{disk} does not hold what was written at byte {start}: take another card"
                    )
                told("reading back", start + len(data), size)
    except OSError as error:
        raise StorageError(
            f"cannot write {disk}: {error.strerror}; run this as root, and look at `dmesg`"
        ) from error


def _chunks(path: Path) -> Iterator[tuple[int, bytes]]:
    start = 0
    with path.open("rb") as file:
        while data := file.read(_CHUNK):
            yield start, data
            start += len(data)


def _removable(about: Path) -> bool:
    """SD cards in a slot of their own are mmc devices, which say that they are not."""
    return _text(about / "removable") == "1" or _text(about / "device/type") == "SD"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
