"""Writes an image to a card: a whole, removable, unmounted disk that is large enough.

What was written is read back and compared.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fleet_protocol.errors import ConfigError, StorageError

_CHUNK_BYTES = 4 << 20
_SECTOR_BYTES = 512
"""The unit in which the kernel states the size of a disk, whatever the disk's own sectors are."""

Progress = Callable[[str, int, int], None]
"""Receives what is being done, the bytes that are done, and the bytes of all."""


@dataclass(frozen=True)
class Disk:
    """A disk that may be overwritten.

    Attributes:
        path: its device file, such as ``/dev/sdb``.
        model: the name that it has for itself.
        size: its size in bytes.
    """

    path: Path
    model: str
    size: int


def find_disk(
    path: Path,
    needed_bytes: int,
    system: Path = Path("/"),
) -> Disk:
    """Return the disk, such as ``/dev/sdb``, that an image may be written to.

    Args:
        path: its device file.
        needed_bytes: size of the image.
        system: root of the file system, which tests replace.

    Raises:
        ConfigError: it is no disk, a partition, built in, in use, or too small.
    """
    block_devices = system / "sys/class/block"
    device = block_devices / path.resolve().name
    is_device_file = system != Path("/") or path.resolve().parent == Path("/dev")
    if not device.is_dir() or not is_device_file:
        candidates = sorted(block_devices.glob("*"))
        removable = [candidate.name for candidate in candidates if _is_removable(candidate)]
        raise ConfigError(
            f"{path} is no disk; those that can be taken out are: {', '.join(removable) or 'none'}"
        )
    if (device / "partition").exists():
        raise ConfigError(
            f"{path} is a part of a disk; name the whole one: /dev/{device.resolve().parent.name}"
        )
    if not _is_removable(device):
        raise ConfigError(
            f"{path} is built in, not a card: its data would be lost; write the image with --out "
            "instead"
        )
    users = _users_of(device, system)
    if users:
        raise ConfigError(
            f"{path} is in use ({', '.join(users)}): umount it first, "
            f"for example: umount {users[0]}"
        )
    # A reader without a card is a disk of no size.
    size = int(_text(device / "size") or 0) * _SECTOR_BYTES
    if size < needed_bytes:
        raise ConfigError(
            f"{path} holds {size / 1e9:.1f} GB, and the image {needed_bytes / 1e9:.1f}: is a card "
            "in it? take a larger one"
        )
    model = _text(device / "device/model") or _text(device / "device/name") or "without a name"
    return Disk(path, model, size)


def _users_of(device: Path, system: Path) -> list[str]:
    """Return what uses a disk or a partition of it: mounts, swap areas, and devices built on it."""
    names = {device.name}
    for partition in device.glob("*/partition"):
        names.add(partition.parent.name)
    users = set()
    for table in ("proc/self/mounts", "proc/swaps"):
        for line in _text(system / table).splitlines():
            source = line.split(maxsplit=1)[:1]
            if source and source[0].removeprefix("/dev/") in names:
                users.add(source[0])
    holders = []
    for name in names:
        # Such as a RAID or an encrypted volume, which no table of mounts names.
        for holder in (device.parent / name / "holders").glob("*"):
            holders.append(holder.name)
    return sorted(users) + sorted(holders)


def _ignore(_step: str, _done: int, _all: int) -> None:
    """Report no progress."""


def write_image(
    image: Path,
    disk: Path,
    report: Progress = _ignore,
) -> None:
    """Write an image to a disk of `find_disk` and read it back.

    Args:
        image: file to write.
        disk: device file to write to.
        report: receives progress in the steps ``writing`` and ``reading back``.

    Raises:
        StorageError: the disk cannot be written, or does not hold what was written.
    """
    size = image.stat().st_size
    try:
        # O_EXCL: the kernel refuses a disk that is mounted, also under another name.
        descriptor = os.open(disk, os.O_RDWR | os.O_EXCL)
        with os.fdopen(descriptor, "r+b", buffering=0) as target:
            for start, data in _chunks(image):
                remaining = memoryview(data)
                while remaining:
                    written = target.write(remaining) or 0
                    remaining = remaining[written:]
                report("writing", start + len(data), size)
            os.fsync(target.fileno())
            # Reading must come from the card and not from the kernel's cache.
            os.posix_fadvise(
                target.fileno(),
                0,
                0,
                os.POSIX_FADV_DONTNEED,
            )
            target.seek(0)
            for start, data in _chunks(image):
                if target.read(len(data)) != data:
                    raise StorageError(
                        f"{disk} does not hold what was written at byte {start}: take another card"
                    )
                report("reading back", start + len(data), size)
    except OSError as error:
        raise StorageError(
            f"cannot write {disk}: {error.strerror}; run this as root, and look at `dmesg`"
        ) from error


def _chunks(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield a file in pieces, each with the position at which it starts."""
    start = 0
    with path.open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            yield start, data
            start += len(data)


def _is_removable(device: Path) -> bool:
    """Return whether a disk can be taken out.

    An SD card in a slot of the board is an mmc device, which the kernel calls not removable.
    """
    return _text(device / "removable") == "1" or _text(device / "device/type") == "SD"


def _text(path: Path) -> str:
    """Return the text of a file of the kernel, empty if it has none."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
