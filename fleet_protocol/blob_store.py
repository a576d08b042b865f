"""Content-addressed files: written beside their place, synced, then renamed, so a digest never changes its content."""

import contextlib
import os
import tempfile
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO

from fleet_protocol.blobs import PartFile, storage_error, write_all
from fleet_protocol.digests import blob_digest, matches, place_of
from fleet_protocol.errors import BlobError
from fleet_protocol.messages import BlobRef

_SYNC_THREADS = 8
_RESERVED_BYTES = 1 << 20  # of smaller files the call costs what it saves


def write_atomically(path: Path, *parts: bytes | memoryview, durable: bool = True) -> None:
    """Replace a file by some parts, in order; see `replacing`."""
    with replacing(path, durable=durable) as file:
        _reserve(file.fileno(), sum(map(len, parts)))
        for part in parts:
            file.write(part)


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """Replace a file so that a reader, or a crash, sees the old content or the new and nothing between.

    It is for its owner alone, and its folder is made. Durable it survives a power cut, else the end of the process.

    Yields:
        What to write the new content to; if the block ends with an error, nothing is replaced.

    Raises:
        StorageError: the disk is full or cannot be written; the old file is untouched.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)  # as the file, which is its owner's alone
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
    """Have the blocks of a large file allocated at once: one by one, as pages are written, costs more than the copy."""
    if size >= _RESERVED_BYTES and hasattr(os, "posix_fallocate"):
        with contextlib.suppress(OSError):  # a full disk refuses what is written, too; others cannot do it
            os.posix_fallocate(descriptor, 0, size)


def _sync(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise storage_error("write", path, error) from error


def _keep(part: Path, path: Path, data: bytes) -> None:
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            write_all(descriptor, data, 0)
            os.ftruncate(descriptor, len(data))
            path.parent.mkdir(exist_ok=True, mode=0o700)
            part.replace(path)
            os.fsync(descriptor)  # after it has its name, which must survive as well
        finally:
            os.close(descriptor)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise storage_error("write", path, error) from error


class BlobStore:
    """A folder of blobs named by their digest: ``objects/<first two digits>/<digest>``, parts under ``parts/``.

    It is made; durable blobs survive a power cut.

    Raises:
        StorageError: the folder cannot be made.
    """

    def __init__(self, root: Path, *, durable: bool = True) -> None:
        self.root = root
        self._objects = root / "objects"
        self._durable = durable
        self._threads = ThreadPoolExecutor(_SYNC_THREADS, "sync")  # begun when there is something for them to do
        self._syncing: dict[str, Future[None]] = {}
        self._spare: list[Path] = []  # files of blobs that were removed, to be written over: half the work of new ones
        self._kept = 0  # blobs of `keep` and `place` whose files are still in use
        try:
            self._objects.mkdir(parents=True, exist_ok=True)
            (root / "parts").mkdir(exist_ok=True)
        except OSError as error:
            raise storage_error("make", root, error) from error

    def path(self, digest: str) -> Path:
        """Where a blob lies, or would lie; a BlobError for what is no digest, so that it becomes no path."""
        try:
            return self._objects / place_of(digest)
        except ValueError as error:
            raise BlobError(str(error)) from error

    def has(self, digest: str) -> bool:
        """Whether the blob is here."""
        return self.path(digest).is_file()

    def begun(self, digest: str) -> bool:
        """Whether the blob is here, or its part is."""
        return self.has(digest) or (self.root / "parts" / digest).exists()

    def put(self, *parts: bytes | memoryview, durable: bool = True) -> str:
        """Keep bytes in parts, and return their digest; without `durable`, `sync` waits for many blobs at once.

        A disk that is full or cannot be written is a StorageError, here and below.
        """
        digest = blob_digest(*parts)
        path = self.path(digest)
        if not path.is_file():
            write_atomically(path, *parts, durable=durable and self._durable)
            if self._durable and not durable:
                self._syncing[digest] = self._threads.submit(_sync, path)
        return digest

    def keep(self, digest: str, data: bytes) -> None:
        """Keep bytes that a digest is known to name; another thread writes them, for which `sync` waits."""
        part = self._spare.pop() if self._spare else self.root / "parts" / f".{digest}"
        self._syncing[digest] = self._threads.submit(_keep, part, self.path(digest), data)
        self._kept += 1

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
        if not matches(data, digest):
            path.unlink(missing_ok=True)
            raise BlobError(f"blob {digest[:12]} in {self.root} was damaged on disk and removed; fetch it again")
        return data

    def part(self, ref: BlobRef, key: str | None = None) -> PartFile:
        """Open, or go on with, a blob that is arriving; its part file is named by its digest or another key."""
        path = self.root / "parts" / (key or ref.digest)
        if self._spare and not path.exists():
            spare = self._spare.pop()
            with contextlib.suppress(OSError):  # a new file does as well; where none can be made, opening it says so
                os.truncate(spare, ref.size)  # with no mark of a chunk
                spare.replace(path)
        return PartFile(ref, path)

    def place(self, source: Path, digest: str, *, durable: bool = True) -> Path:
        """Move a file that a digest is known to name to its place; it is as safe from a power cut as it was before.

        Without `durable`, `sync` waits for it.
        """
        path = self.path(digest)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            source.replace(path)
        except OSError as error:
            raise storage_error("write", path, error) from error
        if not durable:  # while others still arrive
            self._kept += 1
            if self._durable:
                self._syncing[digest] = self._threads.submit(_sync, path)
        return path

    def sync(self, digests: Collection[str]) -> None:
        """Wait until blobs would survive a power cut, if they must: side by side, many take the time of a few."""
        for digest in digests:
            if (begun := self._syncing.pop(digest, None)) is not None:
                begun.result()  # the first that fails raises here
            elif self._durable:
                _sync(self.path(digest))

    def remove(self, digest: str) -> None:
        """Forget a blob; one that is not here is no error."""
        self._syncing.pop(digest, None)
        path, spare = self.path(digest), self.root / "parts" / f".spare-{digest}"
        with contextlib.suppress(FileNotFoundError):
            if not self._kept:
                path.unlink()
                return
            self._kept -= 1
            path.replace(spare)
            if spare.stat().st_nlink == 1:
                self._spare.append(spare)
            else:  # a backup has it
                spare.unlink()

    def forget_spare(self) -> None:
        """Delete the files that wait to be written over, also those that a killed process left."""
        self._spare.clear()
        for path in (self.root / "parts").glob(".spare-*"):
            with contextlib.suppress(OSError):  # what cannot be deleted does no harm
                path.unlink()
