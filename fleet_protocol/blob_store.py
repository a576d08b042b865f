"""Content-addressed files: written beside their place, synced, then renamed, so a digest never changes its content."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from pathlib import Path

from fleet_protocol.blobs import PartFile, storage_error
from fleet_protocol.errors import BlobError
from fleet_protocol.manifest import digest_of
from fleet_protocol.messages import BlobRef

__all__ = ["BlobStore", "write_atomically"]


def write_atomically(path: Path, data: bytes | memoryview, *, durable: bool = True) -> None:
    """Replace a file so that a reader, or a crash, sees the old content or the new and nothing between.

    Args:
        path: the file; its folder is made.
        data: the new content.
        durable: wait until it would survive a power cut; without, it survives the end of the process alone.

    Raises:
        StorageError: the disk is full or cannot be written; the old file is untouched.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        Path(temporary).replace(path)
    except OSError as error:
        if temporary:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
        raise storage_error("write", path, error) from error


class BlobStore:
    """A folder of blobs named by their sha256: ``objects/<first two digits>/<digest>``, parts under ``parts/``.

    Args:
        root: the folder; it is made.
        durable: whether blobs must survive a power cut.

    Raises:
        StorageError: the folder cannot be made.
    """

    def __init__(self, root: Path, *, durable: bool = True) -> None:
        self.root = root
        self._durable = durable
        try:
            (root / "objects").mkdir(parents=True, exist_ok=True)
            (root / "parts").mkdir(exist_ok=True)
        except OSError as error:
            raise storage_error("make", root, error) from error

    def path(self, digest: str) -> Path:
        """Where a blob lies, or would lie.

        Raises:
            BlobError: this is no sha256, so it must not become a path.
        """
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise BlobError(f"{digest!r} is not a sha256")
        return self.root / "objects" / digest[:2] / digest

    def has(self, digest: str) -> bool:
        """Whether the blob is here."""
        return self.path(digest).is_file()

    def put(self, data: bytes | memoryview) -> str:
        """Keep bytes.

        Returns:
            Their digest.

        Raises:
            StorageError: the disk is full or cannot be written.
        """
        digest = digest_of(data)
        path = self.path(digest)
        if not path.is_file():
            write_atomically(path, data, durable=self._durable)
        return digest

    def read(self, digest: str) -> bytes:
        """The bytes of a blob.

        Raises:
            BlobError: it is not here, or what lies here no longer matches (it is then removed).
            StorageError: the disk cannot be read.
        """
        path = self.path(digest)
        try:
            data = path.read_bytes()
        except FileNotFoundError as error:
            raise BlobError(f"blob {digest[:12]} is not in {self.root}") from error
        except OSError as error:
            raise storage_error("read", path, error) from error
        if digest_of(data) != digest:
            path.unlink(missing_ok=True)
            raise BlobError(f"blob {digest[:12]} in {self.root} was damaged on disk and removed; fetch it again")
        return data

    def part(self, ref: BlobRef, key: str | None = None) -> PartFile:
        """Open, or go on with, a blob that is arriving.

        Args:
            ref: the blob.
            key: name of the part file, by default the digest.
        """
        return PartFile(ref, self.root / "parts" / (key or ref.digest))

    def adopt(self, part: PartFile) -> Path:
        """Verify a finished part and move it to its place.

        Raises:
            BlobError: see :meth:`PartFile.finish`.
            StorageError: the disk cannot be written.
        """
        source = part.finish()
        path = self.path(part.ref.digest)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            source.replace(path)
        except OSError as error:
            raise storage_error("write", path, error) from error
        return path

    def remove(self, digest: str) -> None:
        """Forget a blob; one that is not here is no error."""
        self.path(digest).unlink(missing_ok=True)

    def add_file(self, source: Path) -> str:
        """Keep the content of a file, by hard link where the file system allows.

        Returns:
            Its digest.
        """
        data = source.read_bytes()
        digest = digest_of(data)
        path = self.path(digest)
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source, path)
            except OSError:
                shutil.copyfile(source, path)
        return digest
