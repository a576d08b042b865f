"""Blobs that stay on disk between tasks: recent artifact sets and weights, up to a size limit."""

import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from fleet_protocol.blob_store import BlobStore, write_atomically
from fleet_protocol.errors import StorageError
from fleet_protocol.frozen import FrozenModel

_INDEX = "cache.json"
_WEIGHTS_KEPT = (
    2  # the current weights, and the previous ones in case the server returns to an earlier round
)
_SETS_KEPT = 8


class CachedSet(FrozenModel):
    """An artifact set on disk.

    Attributes:
        manifest: digest of its manifest.
        blobs: digests of the manifest and of the graphs that this board has used.
        tested: graphs that have passed their self-test, each with the runtime.
    """

    manifest: str
    blobs: tuple[str, ...]
    tested: tuple[str, ...] = ()


class CacheIndex(FrozenModel):
    """Index of the blobs on disk.

    Attributes:
        version: version of this schema.
        sets: artifact sets, newest last.
        weights: digests of weights, newest last.
        newest: run, round, version of the global model and tier of the last set with the last
            weights.
    """

    version: Literal[1] = 1
    sets: tuple[CachedSet, ...] = ()
    weights: tuple[str, ...] = ()
    newest: Mapping[str, str | int] = Field(default_factory=dict)

    def find(self, manifest: str) -> CachedSet | None:
        """Return the artifact set of a manifest; None if it is not in the index."""
        return next((entry for entry in self.sets if entry.manifest == manifest), None)

    def digests(self) -> set[str]:
        """Return the digests of all blobs in the index."""
        digests = set(self.weights)
        for entry in self.sets:
            digests.update(entry.blobs)
        return digests

    def without_oldest(self) -> "CacheIndex":
        """Return an index without the oldest weights or, if it has none, the oldest set.

        Weights go first: they serve one round, and a set serves all rounds.
        """
        if self.weights:
            return self.model_copy(update={"weights": self.weights[1:]})
        return self.model_copy(update={"sets": self.sets[1:]})

    def sets_but(self, manifest: str) -> tuple[CachedSet, ...]:
        """Return all sets except that of a manifest."""
        return tuple(entry for entry in self.sets if entry.manifest != manifest)


def read_index(folder: Path) -> CacheIndex:
    """Read the index from a state folder; it is empty if the file is missing or damaged."""
    with contextlib.suppress(OSError, ValidationError):
        return CacheIndex.model_validate_json((folder / _INDEX).read_bytes())
    return CacheIndex()


class Cache:
    """The blobs of an agent, with an index of their use.

    The size of blobs that no task uses is limited.
    """

    def __init__(
        self,
        folder: Path,
        blobs: BlobStore,
        max_bytes: int,
    ) -> None:
        self._path = folder / _INDEX
        self._blobs = blobs
        self._max_bytes = max_bytes
        # A lost index costs only a download, so a new one is started.
        self.index = read_index(folder)

    def add_staged(self, manifest: str, graphs: Collection[str]) -> None:
        """Add a set that no task has used yet, before the set of the newest task.

        Args:
            manifest: digest of its manifest.
            graphs: digests of its files.
        """
        entry = CachedSet(manifest=manifest, blobs=tuple(sorted({manifest, *graphs})))
        older = self.index.sets_but(manifest)
        sets = (*older[:-1], entry, *older[-1:])[-_SETS_KEPT:]
        self._save(self.index.model_copy(update={"sets": sets}))

    def add_used(
        self,
        manifest: str,
        graphs: Collection[str],
        weights: str,
        newest: Mapping[str, str | int],
    ) -> None:
        """Add what a task uses.

        Args:
            manifest: digest of the set's manifest.
            graphs: digests of the files of it that the task uses.
            weights: digest of the weights.
            newest: the model, as in the index.
        """
        before = self.index.find(manifest) or CachedSet(manifest=manifest, blobs=())
        entry = CachedSet(
            manifest=manifest,
            blobs=tuple(sorted({manifest, *graphs, *before.blobs})),
            tested=before.tested,
        )
        older_weights = tuple(digest for digest in self.index.weights if digest != weights)
        index = CacheIndex(
            sets=(*self.index.sets_but(manifest), entry)[-_SETS_KEPT:],
            weights=(*older_weights, weights)[-_WEIGHTS_KEPT:],
            newest=newest,
        )
        self._save(index)

    def tested(self, manifest: str) -> frozenset[str]:
        """Return the graphs of a set that passed their self-test here, with the runtime."""
        entry = self.index.find(manifest)
        return frozenset() if entry is None else frozenset(entry.tested)

    def mark_tested(self, manifest: str, graph: str) -> None:
        """Record that a graph of a set passed its self-test."""
        tested = tuple(sorted({*self.tested(manifest), graph}))
        sets: list[CachedSet] = []
        for entry in self.index.sets:
            is_it = entry.manifest == manifest
            sets.append(entry.model_copy(update={"tested": tested}) if is_it else entry)
        self._save(self.index.model_copy(update={"sets": tuple(sets)}))

    def evict(self, keep: Collection[str], *, everything: bool = False) -> int:
        """Delete blobs and parts that nothing needs, then the oldest blobs until the rest fits.

        Args:
            keep: digests that the current task uses.
            everything: delete all other blobs, because the disk is full.

        Returns:
            The bytes freed.
        """
        objects = self._blobs.root / "objects"
        for path in objects.glob("??/.*"):  # temporary files of a process that was killed
            _unlink(path)
        sizes = _sizes(objects)
        size_before = sum(sizes.values())
        bound = 0 if everything else self._max_bytes
        index = self.index
        self._delete_but(index.digests() | {*keep}, sizes)
        while sum(sizes.values()) > bound and (index.weights or index.sets):
            index = index.without_oldest()
            self._delete_but(index.digests() | {*keep}, sizes)
        if index is not self.index:
            self._save(index)
        for path in (self._blobs.root / "parts").glob("*"):
            if path.name not in keep:
                _unlink(path)
        return size_before - sum(sizes.values())

    def _delete_but(self, known: Collection[str], sizes: dict[str, int]) -> None:
        """Delete the blobs that are not in the index, and remove them from the sizes."""
        unknown = [digest for digest in sizes if digest not in known]
        for digest in unknown:
            del sizes[digest]
            # If one cannot be deleted now, the next task tries again.
            with contextlib.suppress(OSError):
                self._blobs.remove(digest)

    def _save(self, index: CacheIndex) -> None:
        self.index = index
        with contextlib.suppress(StorageError):
            write_atomically(self._path, index.model_dump_json(indent=1).encode())


def _sizes(objects: Path) -> dict[str, int]:
    """Return the size in bytes of each blob, by digest."""
    sizes: dict[str, int] = {}
    for path in objects.glob("??/[!.]*"):
        if path.is_file():
            sizes[path.name] = path.stat().st_size
    return sizes


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
