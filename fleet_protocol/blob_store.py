"""Content-addressed files: written beside their place, synced, then renamed, so a digest never
changes its content.
"""

import contextlib
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from numpy.typing import NDArray

from fleet_protocol.digests import blob_digest, blob_path, matches
from fleet_protocol.disk import disk_errors, storage_error
from fleet_protocol.errors import BlobError
from fleet_protocol.mapped_tensors import open_tensors
from fleet_protocol.messages import BlobRef
from fleet_protocol.part_file import PartFile

_SYNC_THREADS = (
    4  # each takes the interpreter from the others for every step of a file: more write no faster
)
_PRIVATE = 0o700  # of folders, whose files are their owner's alone
_RESERVED_BYTES = 1 << 20  # of smaller files the call costs what it saves


def write_atomically(path: Path, *parts: bytes | memoryview, durable: bool = True) -> None:
    """Replace a file by some parts, in order; see `replacing`."""
    with replacing(path, durable=durable) as file:
        _reserve(file.fileno(), sum(map(len, parts)))
        for part in parts:
            file.write(part)


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """Replace a file so that a reader, or a crash, sees the old content or the new and nothing
    between.

    It is for its owner alone, and its folder is made. Durable it survives a power cut, else the end
    of the process.

    Yields:
        What to write the new content to; if the block ends with an error, nothing is replaced.

    Raises:
        StorageError: the disk is full or cannot be written; the old file is untouched.
    """
    temporary = None
    try:
        path.parent.mkdir(
            parents=True, exist_ok=True, mode=_PRIVATE
        )  # as the file, which is its owner's alone
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


def _reserve(descriptor: int, size: int) -> None:
    """Have the blocks of a large file allocated at once: one by one, as pages are written, costs
    more than the copy.
    """
    if size >= _RESERVED_BYTES and hasattr(os, "posix_fallocate"):
        with contextlib.suppress(
            OSError
        ):  # a full disk refuses what is written, too; others cannot do it
            os.posix_fallocate(descriptor, 0, size)


def _sync(path: Path) -> None:
    with disk_errors("write", path):
        descriptor = os.open(path, os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class BlobStore:
    """A folder of blobs named by their digest: ``objects/<first two digits>/<digest>``, parts under
    ``parts/``.

    It is made; durable blobs survive a power cut.

    Raises:
        StorageError: the folder cannot be made.
    """

    def __init__(self, root: Path, *, durable: bool = True) -> None:
        self.root = root
        self._objects = root / "objects"
        self._durable = durable
        self._threads = ThreadPoolExecutor(
            _SYNC_THREADS, "sync"
        )  # begun when there is something for them to do
        self._syncing: dict[str, Future[None]] = {}
        with disk_errors("make", root):
            root.parent.mkdir(parents=True, exist_ok=True)
            for folder in (root, self._objects, root / "parts"):
                folder.mkdir(exist_ok=True, mode=_PRIVATE)

    def path(self, digest: str) -> Path:
        """Where a blob lies, or would lie.

        A BlobError for what is no digest, so that it becomes no path.
        """
        try:
            return self._objects / blob_path(digest)
        except ValueError as error:
            raise BlobError(str(error)) from error

    def has(self, digest: str) -> bool:
        """Whether the blob is here."""
        return self.path(digest).is_file()

    def begun(self, digest: str) -> bool:
        """Whether the blob is here, or its part is."""
        return self.has(digest) or (self.root / "parts" / digest).exists()

    def put(self, *parts: bytes | memoryview, durable: bool = True) -> str:
        """Keep bytes in parts, and return their digest.

        Without `durable` for as long as no power cut takes them.

        A disk that is full or cannot be written is a StorageError, here and below.
        """
        digest = blob_digest(*parts)
        durable = durable and self._durable
        path = self.path(digest)
        if (
            durable or not path.is_file()
        ):  # one that is here may have been put without, and be what a power cut left
            write_atomically(path, *parts, durable=durable)
        return digest

    def keep(self, digest: str, data: bytes) -> None:
        """Keep bytes that a digest is known to name.

        `sync` waits until they would survive a power cut.
        """
        path = self.path(digest)
        write_atomically(path, data, durable=False)
        if self._durable:
            self._syncing[digest] = self._threads.submit(_sync, path)

    def read_unchecked(self, digest: str) -> bytes:
        """What lies under a digest, unchecked.

        A BlobError if nothing does, a StorageError if it cannot be read.
        """
        path = self.path(digest)
        try:
            return path.read_bytes()
        except FileNotFoundError as error:
            raise BlobError(f"blob {digest[:12]} is not in {self.root}") from error
        except OSError as error:
            raise storage_error("read", path, error) from error

    def read(self, digest: str) -> bytes:
        """The bytes of a blob.

        What no longer matches its digest is removed, and a BlobError as in `bytes_of`.
        """
        data = self.read_unchecked(digest)
        if not matches(data, digest):
            self.remove(digest)
            raise BlobError(
                f"blob {digest[:12]} in {self.root} was damaged on disk and removed; fetch it again"
            )
        return data

    def tensors(self, digest: str) -> Mapping[str, NDArray[Any]]:
        """What `open_tensors` finds in a blob."""
        return open_tensors(self.path(digest))

    def part(self, ref: BlobRef, key: str | None = None) -> PartFile:
        """Open, or go on with, a blob that is arriving.

        Its part file is named by its digest or another key.
        """
        return PartFile(ref, self.root / "parts" / (key or ref.digest))

    def place(self, source: Path, digest: str, *, durable: bool = True) -> Path:
        """Move a file that a digest is known to name to its place.

        It is as safe from a power cut as it was before.

        Without `durable`, `sync` waits for it.
        """
        path = self.path(digest)
        with disk_errors("write", path):
            path.parent.mkdir(exist_ok=True, mode=_PRIVATE)
            source.replace(path)
        if not durable and self._durable:  # while others still arrive
            self._syncing[digest] = self._threads.submit(_sync, path)
        return path

    def sync(self, digests: Collection[str]) -> None:
        """Wait until blobs would survive a power cut, if they must: side by side, many take the
        time of a few.
        """
        for digest in digests:
            if (begun := self._syncing.pop(digest, None)) is not None:
                begun.result()  # the first that fails raises here
            elif self._durable:
                _sync(self.path(digest))

    def remove(self, digest: str) -> None:
        """Forget a blob; one that is not here is no error."""
        self._syncing.pop(digest, None)
        self.path(digest).unlink(missing_ok=True)

    def trim(self) -> None:
        """Delete files of which nothing is needed; here there are none."""

    def clear(self) -> None:
        """Forget everything, also what is arriving."""
        for folder in ("parts", "objects"):
            for path in (self.root / folder).rglob("*"):
                if path.is_file():
                    with contextlib.suppress(
                        OSError
                    ):  # what is left is of no task that will ever be open
                        path.unlink()
