"""Writes an image to a card."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fleet_protocol.errors import ConfigError, StorageError

_CHUNK_BYTES = 4 << 20
_SECTOR_BYTES = 512
"""The unit in which the kernel reports the size of a disk, whatever its sector size."""

Progress = Callable[[str, int, int], None]
"""Receives the current step, the number of processed bytes, and the total."""


@dataclass(frozen=True)
class Disk:
    """A disk that may be overwritten.

    Attributes:
        path: its device file, such as ``/dev/sdb``.
        model: the model name that it reports.
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
    """Return the disk to write an image to, such as ``/dev/sdb``.

    Args:
        path: its device file.
        needed_bytes: size of the image.
        system: root of the file system; tests replace it.

    Raises:
        ConfigError: the path is not a disk or is a partition, or the disk is built in, in use or
            too small.
    """
    block_devices = system / "sys/class/block"
    device = block_devices / path.resolve().name
    # A path elsewhere could have the name of a disk by chance.
    is_device_file = system != Path("/") or path.resolve().parent == Path("/dev")
    if not device.is_dir() or not is_device_file:
        candidates = sorted(block_devices.glob("*"))
        removable = [candidate.name for candidate in candidates if _is_removable(candidate)]
        raise ConfigError(
            f"{path} is not a disk; the removable disks are: {', '.join(removable) or 'none'}"
        )
    if (device / "partition").exists():
        raise ConfigError(
            f"{path} is a partition; name the whole disk: /dev/{device.resolve().parent.name}"
        )
    if not _is_removable(device):
        raise ConfigError(
            f"{path} is a built-in disk, not a card, and its data would be lost; write the image"
            " to a file with --out instead"
        )
    users = _users_of(device, system)
    if users:
        raise ConfigError(
            f"{path} is in use ({', '.join(users)}): umount it first, "
            f"for example: umount {users[0]}"
        )
    # A card reader without a card is a disk of size 0.
    size = int(_text(device / "size") or 0) * _SECTOR_BYTES
    if size < needed_bytes:
        raise ConfigError(
            f"{path} has {size / 1e9:.1f} GB, but the image needs {needed_bytes / 1e9:.1f} GB:"
            " check that a card is inserted, or use a larger one"
        )
    # A card reader's device has a model, a board's own slot a name.
    model = _text(device / "device/model") or _text(device / "device/name") or "without a name"
    return Disk(path, model, size)


def _users_of(device: Path, system: Path) -> list[str]:
    """Return the users of a disk and its partitions: mounts, swap areas and stacked devices."""
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
        # Such as a RAID or an encrypted volume, which the mount table does not list.
        for holder in (device.parent / name / "holders").glob("*"):
            holders.append(holder.name)
    return sorted(users) + sorted(holders)


def _ignore(_step: str, _done: int, _all: int) -> None:
    """Ignore the progress."""


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
        StorageError: the disk cannot be written, or its data differs from the image.
    """
    size = image.stat().st_size
    try:
        # O_EXCL: the kernel refuses a mounted disk, even under another name.
        descriptor = os.open(disk, os.O_RDWR | os.O_EXCL)
        with os.fdopen(descriptor, "r+b", buffering=0) as target:
            for start, data in _chunks(image):
                remaining = memoryview(data)
                while remaining:
                    written = target.write(remaining) or 0
                    # The kernel may take less than a whole block.
                    remaining = remaining[written:]
                report("writing", start + len(data), size)
            # Errors of the medium appear here at the latest.
            os.fsync(target.fileno())
            # Read from the card, not from the kernel's cache.
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
                        f"the data read from {disk} at byte {start} differs from the data"
                        " written: use another card"
                    )
                report("reading back", start + len(data), size)
    except OSError as error:
        raise StorageError(
            f"cannot write {disk}: {error.strerror}; run this as root, and look at `dmesg`"
        ) from error


def _chunks(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield a file in blocks, each with its start offset."""
    start = 0
    with path.open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            yield start, data
            start += len(data)


def _is_removable(device: Path) -> bool:
    """Return whether a disk is removable.

    The kernel reports an SD card in a board's slot (an mmc device) as not removable.
    """
    return _text(device / "removable") == "1" or _text(device / "device/type") == "SD"


def _text(path: Path) -> str:
    """Return the text of a kernel file; empty if the file does not exist."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
