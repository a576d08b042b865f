"""The boot partition of a card: a mounted folder, or the FAT partition inside an image.

For an image it uses mtools, which need neither root nor a mount: `mcopy -i image@@offset`.
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

# A sector of the partition table counts 512 bytes, whatever the card's own sectors are.
_SECTOR = 512
# Position of the partition table in the first sector; it has four rows.
_TABLE_START = 446
_TABLE_END = 510
_ROW_BYTES = 16
_FAT_TYPES = {0x04, 0x06, 0x0B, 0x0C, 0x0E}
_MARK = b"\x55\xaa"  # at the end of the first sector
_XZ = b"\xfd7zXZ\x00"
_SECONDS = 300


class Boot:
    """A mounted boot partition."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self) -> set[str]:
        """Return the names at the top level.

        Raises:
            ConfigError: the folder cannot be read.
        """
        try:
            return {path.name for path in self._folder.iterdir()}
        except OSError as error:
            raise ConfigError(
                f"{self._folder}: {error.strerror}; name the folder at which the card's first"
                " partition is mounted"
            ) from error

    def read(self, name: str) -> str:
        """Return the content of a text file at the top level.

        Raises:
            ConfigError: it is missing, or is not text.
        """
        try:
            return self._content(name).decode()
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{name} of the boot partition is not UTF-8 text; write the system onto the card"
                " again"
            ) from error

    def _content(self, name: str) -> bytes:
        try:
            return (self._folder / name).read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{self._folder / name}: {error.strerror}; write the system onto the card again"
            ) from error

    def write(self, files: Mapping[str, bytes]) -> None:
        """Write files in the given order.

        Raises:
            StorageError: the files do not fit.
        """
        for name, data in files.items():
            write_secret(self._folder / name, data)
        # The card may be pulled out once the command returns.
        os.sync()


class FatBoot(Boot):
    """The first FAT partition of an uncompressed image.

    Raises:
        ConfigError: the file is not an image of a card, or mtools are not installed.
    """

    def __init__(self, image: Path) -> None:
        if shutil.which("mcopy") is None:
            raise ConfigError(
                "mcopy, which writes files into images, is not installed: apt install mtools"
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
        ).decode(errors="replace")
        # mdir lists paths with the drive, and folders with a slash at the end.
        return {line.removeprefix("::/").rstrip("/") for line in listing.splitlines()}

    @override
    def _content(self, name: str) -> bytes:
        return self._tool(
            "mtype",
            "-i",
            self._drive,
            f"::/{name}",
        )

    @override
    def write(self, files: Mapping[str, bytes]) -> None:
        folders = {name.partition("/")[0] for name in files if "/" in name}
        # mmd fails for a folder that exists.
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
        done = subprocess.run(  # noqa: S603  (mtools, with known paths)
            command,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
            # Accept images whose size is not a multiple of a track.
            env={**os.environ, "MTOOLS_SKIP_CHECK": "1"},
        )
        if done.returncode:
            output = " ".join(done.stderr.decode(errors="replace").split())
            raise StorageError(
                f"{command[0]} on the boot partition of {self._image}: {output}; check whether"
                " the partition is full or damaged"
            )
        return done.stdout


def is_image(path: Path) -> bool:
    """Return whether a file begins like the image of a card."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(_SECTOR)[-2:] == _MARK
    return False


def copy_image(source: Path, target: Path) -> None:
    """Copy an image, and decompress it.

    Raises:
        ConfigError: the file is not an image, or it is damaged.
        StorageError: the file cannot be read, or the disk is full.
    """
    try:
        # By its first bytes, because a file may have any name.
        with source.open("rb") as file:
            open_file = lzma.open if file.read(len(_XZ)) == _XZ else open
        with open_file(source, "rb") as data:
            first = data.read(_SECTOR)
            if first[-2:] != _MARK:
                raise ConfigError(
                    f"{source} is not an image of a card: it has no partitions; name an .img"
                    " or .img.xz"
                )
            with target.open("wb") as copy:
                copy.write(first)
                shutil.copyfileobj(data, copy, 2**22)
    except (lzma.LZMAError, EOFError) as error:
        raise ConfigError(
            f"{source} is damaged or truncated ({error}); download it again"
        ) from error
    except OSError as error:
        raise StorageError(
            f"cannot copy {source} to {target}: {error.strerror}; free some disk space"
        ) from error


def _fat_offset(image: Path) -> int:
    """Return the start of the first FAT partition in bytes, from the partition table."""
    with image.open("rb") as file:
        table = file.read(_SECTOR)[_TABLE_START:_TABLE_END]
    for start in range(0, len(table), _ROW_BYTES):
        row = table[start : start + _ROW_BYTES]
        # In a row of the MBR, byte 5 is the type, and bytes 9 to 12 are the first sector.
        if len(row) == _ROW_BYTES and row[4] in _FAT_TYPES:
            return int.from_bytes(row[8:12], "little") * _SECTOR
    raise ConfigError(
        f"{image} has no FAT boot partition: use an image of Raspberry Pi OS or of Ubuntu for"
        " Raspberry Pi"
    )
