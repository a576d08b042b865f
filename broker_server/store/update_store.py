"""Stores updates of devices, many in one file, so that they are written and synced together.

Creating a file costs more than writing its bytes. A file is a sequence of safetensors blobs. Each
blob contains its length, so a restarted server finds them again by their digests. A file with no
needed update is overwritten, which is half the work of creating a new one.
"""

import contextlib
import mmap
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import wait
from dataclasses import dataclass
from functools import cached_property
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
# Bytes that are written and synced at once, while other updates arrive.
_WRITE_BYTES = 4 * 1024 * 1024
# A file of this size gets no more updates. It is large, so that few files are open at once.
_FILE_BYTES = 128 * 1024 * 1024


@dataclass(eq=False)
class _Batch:
    """A file of updates.

    Attributes:
        size: offset of the next update.
        needed: number of its updates that are still needed.
    """

    path: Path
    descriptor: int
    size: int = 0
    needed: int = 0


@dataclass(frozen=True)
class _Place:
    """The location of an update: its file, its offset, and its length."""

    batch: _Batch
    start: int
    size: int


def updates_in(path: Path) -> Iterator[tuple[str, int, bytes]]:
    """Yield digest, offset and bytes of each whole update in a file.

    They end at a torn write, or at the remains of an earlier use of the file.
    """
    start = 0
    # A ValueError if the file is empty, which cannot be mapped.
    with path.open("rb") as file, contextlib.suppress(BlobError, ValueError):
        content = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        while start < content.size:
            _, _, size = first_blob(content[start:])
            data = content[start : start + size].tobytes()
            yield blob_digest(data), start, data
            start += len(data)


class StoredTensors(Mapping[str, NDArray[Any]]):
    """The tensors of a stored update, which are read once, when the first of them is needed.

    Reading raises a `BlobError` if the update can no longer be read.

    Args:
        updates: where it is stored.
        digest: its digest.
    """

    def __init__(self, updates: BlobStore, digest: str) -> None:
        self._updates = updates
        self._digest = digest

    @cached_property
    def _tensors(self) -> Mapping[str, NDArray[Any]]:
        return self._updates.tensors(self._digest)

    @override
    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._tensors[name]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    @override
    def __len__(self) -> int:
        return len(self._tensors)


class UpdateStore(BlobStore):
    """A `BlobStore` in which the blobs of `keep` share files.

    The arguments and errors are the same.
    """

    def __init__(self, root: Path, *, durable: bool = True) -> None:
        super().__init__(root, durable=durable)
        self._places: dict[str, _Place] = {}
        # Updates that are not written yet, by digest, and the offset of the first.
        self._unwritten: dict[str, bytes] = {}
        self._unwritten_start = 0
        self._current: _Batch | None = None
        with disk_errors("read", root / FOLDER):
            (root / FOLDER).mkdir(exist_ok=True, mode=0o700)
            batches = []
            for path in sorted((root / FOLDER).iterdir()):
                batch = _Batch(path, os.open(path, os.O_RDWR))
                for digest, start, data in updates_in(path):
                    self._put(digest, batch, start, len(data))
                batches.append(batch)
        self._free = [batch for batch in batches if not batch.needed]

    def _put(self, digest: str, batch: _Batch, start: int, size: int) -> None:
        self._places[digest] = _Place(batch, start, size)
        batch.size = start + size
        batch.needed += 1

    def _begin(self) -> _Batch:
        """Return a file to write from its beginning: a free one, or a new one.

        A file that a backup has linked must keep its bytes.
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
        # A file that cannot be deleted does no harm.
        with contextlib.suppress(OSError):
            batch.path.unlink()

    @override
    def keep(self, digest: str, data: bytes) -> None:
        """Append bytes to the current file, to be written soon."""
        if digest in self._places:
            return
        if self._current is None or self._current.size >= _FILE_BYTES:
            self._write_out()
            self._current = self._begin()
        if not self._unwritten:
            self._unwritten_start = self._current.size
        self._put(digest, self._current, self._current.size, len(data))
        self._unwritten[digest] = data
        if self._current.size - self._unwritten_start >= _WRITE_BYTES:
            self._write_out()

    def _write_out(self) -> None:
        """Let a thread write and sync the updates that are not written yet."""
        if self._current is None or not self._unwritten:
            return
        updates = self._unwritten.values()
        job = self._threads.submit(self._write_to, self._current, updates, self._unwritten_start)
        self._syncing.update(dict.fromkeys(self._unwritten, job))
        # A new mapping: the thread reads the old one.
        self._unwritten = {}

    def _write_to(self, batch: _Batch, updates: Iterable[bytes], start: int) -> None:
        with disk_errors("write", batch.path):
            for data in updates:
                write_all(batch.descriptor, data, start)
                start += len(data)
            if self._durable:
                os.fsync(batch.descriptor)

    def _is_synced(self, digest: str) -> bool:
        return digest in self._places and digest not in self._syncing

    @override
    def sync(self, digests: Collection[str]) -> None:
        """Wait as `BlobStore` does; if the disk is full, none of the blobs is stored."""
        self._write_out()
        # `BlobStore` does not know an update whose file is synced.
        waiting = [digest for digest in digests if not self._is_synced(digest)]
        try:
            super().sync(waiting)
        except StorageError:
            wait(self._syncing.values())
            # The file has a hole, so nothing may be appended to it.
            self._current = None
            for digest in digests:
                self.remove(digest)
            raise

    @override
    def read_unchecked(self, digest: str) -> bytes:
        """Return the bytes under a digest, unchecked."""
        if digest not in self._places:
            return super().read_unchecked(digest)
        self.sync((digest,))
        place = self._places[digest]
        return os.pread(place.batch.descriptor, place.size, place.start)

    @override
    def tensors(self, digest: str) -> Mapping[str, NDArray[Any]]:
        """Return the tensors of an update."""
        if digest not in self._places:
            return super().tensors(digest)
        return tensors_in(self.read_unchecked(digest), f"update {digest[:12]}")

    @override
    def remove(self, digest: str) -> None:
        """Forget a blob; its file is free if it was the last one in it."""
        if digest not in self._places:
            super().remove(digest)
            return
        if digest in self._unwritten:
            self._write_out()
        job = self._syncing.pop(digest, None)
        if job is not None:
            wait([job])
        batch = self._places.pop(digest).batch
        batch.needed -= 1
        if not batch.needed:
            if batch is self._current:
                self._current = None
            self._free.append(batch)

    @override
    def trim(self) -> None:
        """Delete the free files."""
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
        """Close the files without deleting them."""
        self._write_out()
        wait(self._syncing.values())
        batches = {place.batch for place in self._places.values()}
        for batch in batches.union(self._free):
            os.close(batch.descriptor)
