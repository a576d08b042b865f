"""Updates that devices sent, many to a file: written and synced together, since files cost more
than their bytes do.

A file is one safetensors blob behind the other; each says how long it is, so a server that starts
finds them again by their digests. A file of which nothing is needed any more is written over, which
is half the work of a new one.
"""

import contextlib
import mmap
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from fleet_protocol.blob_store import BlobStore
from fleet_protocol.digests import blob_digest
from fleet_protocol.disk import disk_errors, write_all
from fleet_protocol.errors import BlobError, StorageError
from fleet_protocol.mapped_tensors import first_blob, tensors_in

FOLDER = "batches"
_WRITE_BYTES = (
    4 * 1024 * 1024
)  # of updates that are written and synced at once, while others arrive
_FILE_BYTES = 128 * 1024 * 1024  # from which on a file gets no more: few enough are open at once


@dataclass(eq=False)
class _Batch:
    """A file of updates: its length, and how many of them are still needed."""

    path: Path
    descriptor: int
    size: int = 0
    needed: int = 0


def updates_in(path: Path) -> Iterator[tuple[str, int, bytes]]:
    """The digest, place and bytes of each whole update in a file, up to what was torn or left over."""
    at = 0
    with (
        path.open("rb") as file,
        contextlib.suppress(BlobError, ValueError),
    ):  # an empty file cannot be mapped
        whole = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        while at < whole.size:
            data = whole[at : at + first_blob(whole[at:])[2]].tobytes()
            yield blob_digest(data), at, data
            at += len(data)


class UpdateStore(BlobStore):
    """The blobs of `BlobStore`, of which those of `keep` share files.

    Arguments and errors are the same.
    """

    def __init__(self, root: Path, *, durable: bool = True) -> None:
        super().__init__(root, durable=durable)
        self._places: dict[str, tuple[_Batch, int, int]] = {}  # where each begins, and its length
        self._unwritten: dict[str, bytes] = {}
        self._from = 0  # where the first of these begins
        self._current: _Batch | None = None
        with disk_errors("read", root / FOLDER):
            (root / FOLDER).mkdir(exist_ok=True, mode=0o700)
            found = [
                _Batch(path, os.open(path, os.O_RDWR)) for path in sorted((root / FOLDER).iterdir())
            ]
            for batch in found:
                for digest, at, data in updates_in(batch.path):
                    self._put(digest, batch, at, len(data))
        self._free = [batch for batch in found if not batch.needed]

    def _put(self, digest: str, batch: _Batch, at: int, size: int) -> None:
        self._places[digest] = batch, at, size
        batch.size = at + size
        batch.needed = batch.needed + 1

    def _begin(self) -> _Batch:
        """A file to write from its beginning: one of which nothing is needed and that no backup
        has, or a new one.
        """
        while self._free:
            batch = self._free.pop()
            if os.fstat(batch.descriptor).st_nlink == 1:
                batch.size = 0
                return batch
            self._delete(batch)
        with disk_errors("make a file in", self.root / FOLDER):
            descriptor, path = tempfile.mkstemp(dir=self.root / FOLDER)
        return _Batch(Path(path), descriptor)

    def _delete(self, batch: _Batch) -> None:
        os.close(batch.descriptor)
        with contextlib.suppress(OSError):  # what cannot be deleted does no harm
            batch.path.unlink()

    @override
    def keep(self, digest: str, data: bytes) -> None:
        """Put bytes behind those before them, to be written soon."""
        if digest in self._places:
            return
        if self._current is None or self._current.size >= _FILE_BYTES:
            self._write_out()
            self._current = self._begin()
        self._from = self._from if self._unwritten else self._current.size
        self._put(digest, self._current, self._current.size, len(data))
        self._unwritten[digest] = data
        if self._current.size - self._from >= _WRITE_BYTES:
            self._write_out()

    def _write_out(self) -> None:
        if self._current is not None and self._unwritten:
            job = self._threads.submit(
                self._write_to, self._current, self._unwritten.values(), self._from
            )
            self._syncing.update(dict.fromkeys(self._unwritten, job))
            self._unwritten = {}

    def _write_to(self, batch: _Batch, parts: Iterable[bytes], at: int) -> None:
        with disk_errors("write", batch.path):
            for part in parts:
                write_all(batch.descriptor, part, at)
                at += len(part)
            if self._durable:
                os.fsync(batch.descriptor)

    @override
    def sync(self, digests: Collection[str]) -> None:
        """Wait as `BlobStore` does; where the disk is full, none of the blobs is there."""
        self._write_out()
        try:
            super().sync(
                [
                    digest
                    for digest in digests
                    if digest in self._syncing or digest not in self._places
                ]
            )
        except StorageError:
            wait(self._syncing.values())
            self._current = None  # the file has a hole, and gets nothing more
            for digest in digests:
                self.remove(digest)
            raise

    @override
    def read_unchecked(self, digest: str) -> bytes:
        """What lies under a digest, unchecked."""
        if digest not in self._places:
            return super().read_unchecked(digest)
        self.sync((digest,))
        batch, at, size = self._places[digest]
        return os.pread(batch.descriptor, size, at)

    @override
    def tensors(self, digest: str) -> Mapping[str, NDArray[Any]]:
        """The tensors of an update."""
        kept = digest in self._places
        return (
            tensors_in(self.read_unchecked(digest), f"update {digest[:12]}")
            if kept
            else super().tensors(digest)
        )

    @override
    def remove(self, digest: str) -> None:
        """Forget a blob; a file of which that was the last is free."""
        if digest not in self._places:
            super().remove(digest)
            return
        if digest in self._unwritten:
            self._write_out()
        if (job := self._syncing.pop(digest, None)) is not None:
            wait([job])
        batch, _, _ = self._places.pop(digest)
        batch.needed -= 1
        if not batch.needed:
            self._current = None if batch is self._current else self._current
            self._free.append(batch)

    @override
    def trim(self) -> None:
        """Delete the files that are free."""
        for batch in self._free:
            self._delete(batch)
        self._free = []

    @override
    def clear(self) -> None:
        """Forget everything."""
        for digest in list(self._places):
            self.remove(digest)
        self.trim()
        super().clear()

    def close(self) -> None:
        """Close the files, which stay."""
        self._write_out()
        wait(self._syncing.values())
        for batch in {*self._free, *(batch for batch, _, _ in self._places.values())}:
            os.close(batch.descriptor)
