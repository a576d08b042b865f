"""What stays on disk between tasks: recent artifact sets and weights, within a bound."""

import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from fleet_protocol.blob_store import BlobStore, write_atomically
from fleet_protocol.errors import StorageError
from fleet_protocol.frozen import FrozenModel

_WEIGHTS_KEPT = 2  # the current ones, and the previous ones in case the server falls back a round
_SETS_KEPT = 8


class CachedSet(FrozenModel):
    """An artifact set on disk: digests of its manifest, and of that and the graphs this board has
    used.

    It was `tested` under a runtime, graph by graph.
    """

    manifest: str
    blobs: tuple[str, ...]
    tested: tuple[str, ...] = ()


class CacheIndex(FrozenModel):
    """What the blobs on disk are, newest last: artifact sets, and digests of weights.

    `newest` is run, round, version of the global model and tier of the last set with the last
    weights.
    """

    version: Literal[1] = 1
    sets: tuple[CachedSet, ...] = ()
    weights: tuple[str, ...] = ()
    newest: Mapping[str, str | int] = Field(default_factory=dict)


_INDEX = "cache.json"


def read_index(folder: Path) -> CacheIndex:
    """The index of an agent's state folder; an empty one where none is, or where it is damaged."""
    with contextlib.suppress(OSError, ValidationError):
        return CacheIndex.model_validate_json((folder / _INDEX).read_bytes())
    return CacheIndex()


class Cache:
    """The blobs of an agent with an index that says what they are for.

    Those that no task uses have a bound.
    """

    def __init__(self, folder: Path, blobs: BlobStore, max_bytes: int) -> None:
        self._path = folder / _INDEX
        self._blobs = blobs
        self._max_bytes = max_bytes
        self.index = read_index(
            folder
        )  # one that is lost costs a download, so it is simply started again

    def _save(self, index: CacheIndex) -> None:
        self.index = index
        with contextlib.suppress(StorageError):
            write_atomically(self._path, index.model_dump_json(indent=1).encode())

    def staged(self, manifest: str, graphs: Collection[str]) -> None:
        """Note the digests of a set that no task has used yet, and of its files, before those of
        the newest task.
        """
        entry = CachedSet(manifest=manifest, blobs=tuple(sorted({manifest, *graphs})))
        others = tuple(e for e in self.index.sets if e.manifest != manifest)
        self._save(
            self.index.model_copy(
                update={"sets": (*others[:-1], entry, *others[-1:])[-_SETS_KEPT:]}
            )
        )

    def used(
        self,
        manifest: str,
        graphs: Collection[str],
        weights: str,
        newest: Mapping[str, str | int],
    ) -> None:
        """Note the digests of what a task uses, and which model that is, as of the index."""
        old = next((entry for entry in self.index.sets if entry.manifest == manifest), None)
        entry = CachedSet(
            manifest=manifest,
            blobs=tuple(sorted({manifest, *graphs, *(old.blobs if old else ())})),
            tested=old.tested if old else (),
        )
        others = tuple(e for e in self.index.sets if e.manifest != manifest)
        recent = tuple(w for w in self.index.weights if w != weights)
        sets = (*others, entry)[-_SETS_KEPT:]
        recent = (*recent, weights)[-_WEIGHTS_KEPT:]
        self._save(CacheIndex(sets=sets, weights=recent, newest=newest))

    def tested(self, manifest: str) -> frozenset[str]:
        """What of a set passed its self-test on this board: graphs with the runtime."""
        return frozenset(
            name for entry in self.index.sets if entry.manifest == manifest for name in entry.tested
        )

    def mark_tested(self, manifest: str, graph: str) -> None:
        """Note that a graph of a set passed its self-test."""
        tested = tuple(sorted({*self.tested(manifest), graph}))
        sets = (
            entry.model_copy(update={"tested": tested}) if entry.manifest == manifest else entry
            for entry in self.index.sets
        )
        self._save(self.index.model_copy(update={"sets": tuple(sets)}))

    def evict(self, keep: Collection[str], *, everything: bool = False) -> int:
        """Delete blobs and parts that nothing needs, then the oldest until the rest fits.

        Returns the bytes freed.

        What the task in hand uses is what to `keep`; `everything` else goes when the disk is full.
        """
        bound = 0 if everything else self._max_bytes
        objects = self._blobs.root / "objects"
        for path in objects.glob("??/.*"):  # what a process wrote that was killed
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        sizes = {
            path.name: path.stat().st_size for path in objects.glob("??/[!.]*") if path.is_file()
        }
        sets = list(self.index.sets)
        weights = list(self.index.weights)
        before = sum(sizes.values())

        def forget() -> None:
            known = {
                *keep,
                *weights,
                *(digest for entry in sets for digest in entry.blobs),
            }
            for digest in [d for d in sizes if d not in known]:
                del sizes[digest]
                with contextlib.suppress(OSError):
                    self._blobs.remove(digest)

        forget()
        while sum(sizes.values()) > bound and (weights or sets):
            # Weights go first: they are of one round, a set serves them all.
            (weights or sets).pop(0)
            forget()
        if (tuple(sets), tuple(weights)) != (self.index.sets, self.index.weights):
            self._save(
                self.index.model_copy(update={"sets": tuple(sets), "weights": tuple(weights)})
            )
        for path in (self._blobs.root / "parts").glob("*"):
            if path.name not in keep:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
        return before - sum(sizes.values())
