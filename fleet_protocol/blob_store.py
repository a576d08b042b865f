"""Stores files by the digest of their content; each is written beside its place and then renamed.

So a digest never names other content.
"""

import contextlib
import os
import stat
import tempfile
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from numpy.typing import NDArray

from fleet_protocol.digests import blob_digest, blob_path, matches
from fleet_protocol.disk import disk_errors, storage_error
from fleet_protocol.errors import BlobError, StorageError
from fleet_protocol.mapped_tensors import open_tensors
from fleet_protocol.messages import BlobRef
from fleet_protocol.part_file import PartFile

# More threads do not write faster, because each needs the interpreter for every step of a file.
_SYNC_THREADS = 4
_PRIVATE = 0o700
_RESERVED_BYTES = 1 << 20  # for smaller files the call costs as much as it saves


def write_atomically(
    path: Path,
    *parts: bytes | memoryview,
    durable: bool = True,
) -> None:
    """Replace the content of a file by several buffers, in order; see `replacing`."""
    with replacing(path, durable=durable) as file:
        _reserve(file.fileno(), sum(map(len, parts)))
        for buffer in parts:
            file.write(buffer)


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """Replace a file so that a reader, or a crash, sees only the old content or the new.

    Only the owner can read the file; its folder is created.

    Args:
        path: path of the file.
        durable: whether the new content must survive a power cut, and not only the end of the
            process.

    Yields:
        A file for the new content; if the block ends with an error, nothing is replaced.

    Raises:
        StorageError: the disk is full or cannot be written, or the path is a device; the old file
            is intact.
    """
    _refuse_device(path)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=_PRIVATE)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "w+b") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        Path(temporary).replace(path)
        temporary = None
    except OSError as error:
        raise storage_error("write", path, error) from error
    finally:
        if temporary:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()


def _refuse_device(path: Path) -> None:
    """Refuse to put a file in the place of a device, such as ``/dev/null``, or of a link to one.

    Root may do that, and every program of the machine would write into the file from then on.

    Raises:
        StorageError: the path is a device, or a link to something other than a file or folder.
    """
    try:
        mode = path.stat().st_mode
    except OSError:  # nothing is there, or the error comes again where it is written
        return
    is_device = stat.S_ISCHR(mode) or stat.S_ISBLK(mode)
    leads_elsewhere = path.is_symlink() and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
    if is_device or leads_elsewhere:
        raise StorageError(
            f"cannot write {path}: it is not a file but a device or stream, which a file would"
            " replace; name a file"
        )


def _reserve(descriptor: int, size: int) -> None:
    """Allocate the blocks of a large file at once.

    Allocating them one by one, as pages are written, costs more than the copy.
    """
    if size >= _RESERVED_BYTES and hasattr(os, "posix_fallocate"):
        # A full disk refuses the content, too, and some file systems do not support this.
        with contextlib.suppress(OSError):
            os.posix_fallocate(descriptor, 0, size)


def _sync(path: Path) -> None:
    with disk_errors("write", path):
        descriptor = os.open(path, os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class BlobStore:
    """A folder of blobs by their digests: ``objects/<first two digits>/<digest>``.

    Arriving blobs are stored under ``parts/``.

    Args:
        root: the folder, which is created.
        durable: whether blobs must survive a power cut.

    Raises:
        StorageError: the folder cannot be created.
    """

    def __init__(self, root: Path, *, durable: bool = True) -> None:
        self.root = root
        self._objects = root / "objects"
        self._durable = durable
        self._threads = ThreadPoolExecutor(_SYNC_THREADS, "sync")  # they start when needed
        self._syncing: dict[str, Future[None]] = {}
        with disk_errors("make", root):
            root.parent.mkdir(parents=True, exist_ok=True)
            for folder in (root, self._objects, root / "parts"):
                folder.mkdir(exist_ok=True, mode=_PRIVATE)

    def path(self, digest: str) -> Path:
        """Return the path of a blob, whether it is stored or not.

        Raises:
            BlobError: the text is not a digest, so it is not used in a path.
        """
        try:
            return self._objects / blob_path(digest)
        except ValueError as error:
            raise BlobError(str(error)) from error

    def has(self, digest: str) -> bool:
        """Return whether a blob is stored."""
        return self.path(digest).is_file()

    def begun(self, digest: str) -> bool:
        """Return whether a blob is stored, or arriving."""
        return self.has(digest) or (self.root / "parts" / digest).exists()

    def put(self, *parts: bytes | memoryview, durable: bool = True) -> str:
        """Store a blob that is given in parts, and return its digest.

        Without `durable` it need not survive a power cut.

        Raises:
            StorageError: the disk is full or cannot be written, here and below.
        """
        digest = blob_digest(*parts)
        durable = durable and self._durable
        path = self.path(digest)
        # An existing file may have been stored without `durable`, and been damaged by a power cut.
        if durable or not path.is_file():
            write_atomically(path, *parts, durable=durable)
        return digest

    def keep(self, digest: str, data: bytes) -> None:
        """Store bytes under their digest; `sync` waits until they survive a power cut."""
        path = self.path(digest)
        write_atomically(path, data, durable=False)
        if self._durable:
            self._syncing[digest] = self._threads.submit(_sync, path)

    def read_unchecked(self, digest: str) -> bytes:
        """Return the content of a blob without checking its digest.

        Raises:
            BlobError: the blob is not stored.
            StorageError: it cannot be read.
        """
        path = self.path(digest)
        try:
            return path.read_bytes()
        except FileNotFoundError as error:
            raise BlobError(f"blob {digest[:12]} is not in {self.root}") from error
        except OSError as error:
            raise storage_error("read", path, error) from error

    def read(self, digest: str) -> bytes:
        """Return the content of a blob.

        Raises:
            BlobError: the blob is not stored, or no longer matched its digest and was removed.
            StorageError: it cannot be read.
        """
        data = self.read_unchecked(digest)
        if not matches(data, digest):
            self.remove(digest)
            raise BlobError(
                f"blob {digest[:12]} in {self.root} was damaged on disk and removed; fetch it again"
            )
        return data

    def tensors(self, digest: str) -> Mapping[str, NDArray[Any]]:
        """Return the tensors of a blob, as `open_tensors`."""
        return open_tensors(self.path(digest))

    def part(self, ref: BlobRef, key: str | None = None) -> PartFile:
        """Open the file of a blob that is arriving, or continue it.

        The file is named by the digest of the blob, or by another key.
        """
        return PartFile(ref, self.root / "parts" / (key or ref.digest))

    def place(
        self,
        source: Path,
        digest: str,
        *,
        durable: bool = True,
    ) -> Path:
        """Move a file whose digest is known to its place, and return that place.

        It is as durable as it was before. Without `durable`, `sync` waits until it survives a power
        cut.
        """
        path = self.path(digest)
        with disk_errors("write", path):
            path.parent.mkdir(exist_ok=True, mode=_PRIVATE)
            source.replace(path)
        if not durable and self._durable:  # while others still arrive
            self._syncing[digest] = self._threads.submit(_sync, path)
        return path

    def sync(self, digests: Collection[str]) -> None:
        """Wait until blobs survive a power cut, if they must.

        Syncing many files in parallel takes the time of a few.
        """
        for digest in digests:
            pending = self._syncing.pop(digest, None)
            if pending is not None:
                pending.result()  # the first that fails raises here
            elif self._durable:
                _sync(self.path(digest))

    def remove(self, digest: str) -> None:
        """Delete a blob, if it is stored."""
        self._syncing.pop(digest, None)
        self.path(digest).unlink(missing_ok=True)

    def trim(self) -> None:
        """Delete files that are no longer needed; in this class there are none."""

    def clear(self) -> None:
        """Delete all blobs, including those that are arriving."""
        for folder in ("parts", "objects"):
            for path in (self.root / folder).rglob("*"):
                if not path.is_file():
                    continue
                # A file that cannot be deleted belongs to no task that will be open again.
                with contextlib.suppress(OSError):
                    path.unlink()
