"""The boot partition of a card: a folder where it is mounted, or the FAT partition inside an image.

The latter is reached by mtools, which need neither root nor a mount: `mcopy -i image@@offset`.
"""

import contextlib
import lzma
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from typing_extensions import override

from fleet_protocol.errors import ConfigError, StorageError
from fleet_protocol.identity.enrolment import write_secret

_SECTOR = 512
# In the first sector: the table of partitions, and its four rows.
_TABLE_START = 446
_TABLE_END = 510
_ROW_BYTES = 16
_FAT_TYPES = {0x04, 0x06, 0x0B, 0x0C, 0x0E}
_MARK = b"\x55\xaa"  # at the end of the first sector
_XZ = b"\xfd7zXZ\x00"
_SECONDS = 300


class Boot:
    """A boot partition that is mounted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self) -> set[str]:
        """Return the names of what lies at its top.

        Raises:
            ConfigError: the folder cannot be read.
        """
        try:
            return {path.name for path in self._folder.iterdir()}
        except OSError as error:
            raise ConfigError(
                f"{self._folder}: {error.strerror}; name the folder where the card's first "
                "partition is mounted"
            ) from error

    def read(self, name: str) -> str:
        """Return the content of a text file at its top."""
        return (self._folder / name).read_text(encoding="utf-8")

    def write(self, files: Mapping[str, bytes]) -> None:
        """Write files in their order.

        Raises:
            StorageError: they do not fit.
        """
        for name, data in files.items():
            write_secret(self._folder / name, data)
        os.sync()


class FatBoot(Boot):
    """The first FAT partition of an uncompressed image.

    Raises:
        ConfigError: it is no image of a card, or mtools are not installed.
    """

    def __init__(self, image: Path) -> None:
        if shutil.which("mcopy") is None:
            raise ConfigError(
                "mcopy is not installed, which reaches into images: apt install mtools"
            )
        self._image = image
        self._drive = f"{image}@@{_fat_offset(image)}"

    @override
    def names(self) -> set[str]:
        listing = self._tool(
            "mdir",
            "-b",
            "-i",
            self._drive,
            "::/",
        ).decode()
        return {line.removeprefix("::/").rstrip("/") for line in listing.splitlines()}

    @override
    def read(self, name: str) -> str:
        return self._tool(
            "mtype",
            "-i",
            self._drive,
            f"::/{name}",
        ).decode()

    @override
    def write(self, files: Mapping[str, bytes]) -> None:
        folders = {name.partition("/")[0] for name in files if "/" in name}
        for folder_name in sorted(folders - self.names()):
            self._tool("mmd", "-i", self._drive, f"::/{folder_name}")
        # mcopy takes files and not bytes.
        with tempfile.TemporaryDirectory() as folder:
            Boot(Path(folder)).write(files)
            for name in files:
                self._tool(
                    "mcopy",
                    "-o",
                    "-i",
                    self._drive,
                    f"{folder}/{name}",
                    f"::/{name}",
                )

    def _tool(self, *command: str) -> bytes:
        done = subprocess.run(  # noqa: S603  (mtools, with paths of our own)
            command,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
            # Images whose size is no multiple of a track are right, too.
            env={**os.environ, "MTOOLS_SKIP_CHECK": "1"},
        )
        if done.returncode:
            output = " ".join(done.stderr.decode(errors="replace").split())
            raise StorageError(
                f"{command[0]} on the boot partition of {self._image}: {output}; "
                "is it full, or damaged?"
            )
        return done.stdout


def is_image(path: Path) -> bool:
    """Return whether a file begins as the image of a card does."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(_SECTOR)[-2:] == _MARK
    return False


def copy_image(source: Path, target: Path) -> None:
    """Copy an image, unpacked.

    Raises:
        ConfigError: it is no image, or damaged.
        StorageError: it cannot be read, or there is no room.
    """
    try:
        with source.open("rb") as file:
            open_file = lzma.open if file.read(len(_XZ)) == _XZ else open
        with open_file(source, "rb") as data:
            first = data.read(_SECTOR)
            if first[-2:] != _MARK:
                raise ConfigError(
                    f"{source} is no image of a card: it has no partitions; name an .img or .img.xz"
                )
            with target.open("wb") as copy:
                copy.write(first)
                shutil.copyfileobj(data, copy, 2**22)
    except (lzma.LZMAError, EOFError) as error:
        raise ConfigError(f"{source} is damaged or cut off ({error}); fetch it again") from error
    except OSError as error:
        raise StorageError(
            f"cannot copy {source} to {target}: {error.strerror}; make room"
        ) from error


def _fat_offset(image: Path) -> int:
    """Return where the first FAT partition starts, in bytes, by the table in the first sector."""
    with image.open("rb") as file:
        table = file.read(_SECTOR)[_TABLE_START:_TABLE_END]
    for start in range(0, len(table), _ROW_BYTES):
        row = table[start : start + _ROW_BYTES]
        # Of a row (MBR) the fifth byte is the type, and the ninth to twelfth the first sector.
        if len(row) == _ROW_BYTES and row[4] in _FAT_TYPES:
            return int.from_bytes(row[8:12], "little") * _SECTOR
    raise ConfigError(
        f"{image} has no FAT partition to start from: is it Raspberry Pi OS, "
        "or Ubuntu for Raspberry Pi?"
    )
