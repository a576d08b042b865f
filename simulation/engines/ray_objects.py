"""Puts files and weights into Ray's store, for actors without access to the folder."""

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import ray

from fleet_protocol.blob_store import BlobStore
from simulation.engines.parcel import packing_list
from simulation.orders import WorkerSetup

# Bytes of a file per object: Ray's store spills objects that do not fit to disk, one at a time.
_CHUNK_BYTES = 64 * 2**20


class RayObjects:
    """References to objects in Ray's store; the store drops an object with its last reference."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._blobs = BlobStore(setup.blobs, durable=False)
        self._files: dict[str, list[Any]] | None = None
        self._weights: dict[str, Any] = {}

    def files(self) -> dict[str, list[Any]]:
        """Return the chunks of the constant files, by their paths in a folder.

        Hard links to one file are sent once.
        """
        if self._files is None:
            chunks_by_inode: dict[tuple[int, int], list[Any]] = {}
            self._files = {}
            for place, path in packing_list(self._setup).items():
                # Tiers share files by hard links, and each would be copied again.
                status = path.stat()
                inode = (status.st_dev, status.st_ino)
                if inode not in chunks_by_inode:
                    chunks_by_inode[inode] = list(_put_chunks(path))
                self._files[place] = chunks_by_inode[inode]
        return self._files

    def weights(self, digests: Iterable[str]) -> dict[str, Any]:
        """Return weights by digest; missing ones are added to the store."""
        weights = {}
        for digest in digests:
            # The weights stay as a reference, so a slice is copied once for all tasks of a round.
            if digest not in self._weights:
                self._weights[digest] = ray.put(self._blobs.read(digest))
            weights[digest] = self._weights[digest]
        return weights

    def keep_weights(self, digests: Collection[str]) -> None:
        """Drop all weights but these."""
        for digest in list(self._weights):
            if digest not in digests:
                del self._weights[digest]

    def clear(self) -> None:
        """Drop everything."""
        self._weights = {}
        self._files = None


def _put_chunks(path: Path) -> Iterator[Any]:
    """Put a file into the store, and yield the references of its chunks."""
    with path.open("rb") as file:
        yield ray.put(file.read(_CHUNK_BYTES))  # an empty file is one empty chunk
        while chunk := file.read(_CHUNK_BYTES):
            yield ray.put(chunk)
