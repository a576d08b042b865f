"""Taking a stored global version out of the store."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from broker_server.store import Store, VersionRecord
from broker_server.store.promotion import promoted
from broker_server.store.queries import find_run
from fleet_protocol.blob_store import BlobStore, write_atomically
from fleet_protocol.digests import matches
from fleet_protocol.errors import BlobError, ConfigError
from fleet_protocol.mapped_tensors import open_tensors
from fleet_protocol.weights import encode_weights


@dataclass(frozen=True)
class ExportedVersion:
    """A global version with its parameters, float32, in layout order, and the statistics it was
    evaluated with, if any.

    These are ``stat.<norm>.mean`` and ``.var``.
    """

    record: VersionRecord
    arch: str
    weights: dict[str, NDArray[Any]]
    statistics: dict[str, NDArray[Any]]

    @property
    def metadata(self) -> dict[str, str]:
        """Where it comes from, as strings for a file's header."""
        found = {
            "arch": self.arch,
            "run": self.record.run,
            "version": str(self.record.number),
        }
        if self.record.evaluation is not None:
            evaluation = self.record.evaluation
            found |= {"loss": repr(evaluation.loss)} | {
                m.name: repr(m.value) for m in evaluation.metrics
            }
            found |= {} if evaluation.accuracy is None else {"accuracy": repr(evaluation.accuracy)}
        return found


def load_version(
    store: Store, run: str | None = None, version: int | None = None
) -> ExportedVersion:
    """Read a global version of a run: by default the one that was promoted, or else the last, of
    the newest run.

    Raises:
        ConfigError: there is no such run or version, or its weights are not kept.
        BlobError: its blob is damaged, or that of its statistics missing.
    """
    record = find_run(store, run)
    found = (promoted(store, record.id) if version is None else None) or store.version(
        record.id, version
    )
    if found is None:
        last = store.version(record.id)
        known = f"it has versions 0 to {last.number}" if last is not None else "it has none"
        raise ConfigError(f"run {record.id} has no version {version}; {known}")
    blobs = BlobStore(store.folder / "blobs")
    if not blobs.has(found.digest):
        there = [str(item.number) for item in store.versions(record.id) if blobs.has(item.digest)]
        raise ConfigError(
            f"the weights of version {found.number} of run {record.id} are no longer in {store.folder}; those of"
            f" {', '.join(there) or 'none'} are (keep_versions says how many stay)"
        )
    require_whole(blobs, found.number, found.digest, found.statistics_digest)
    weights = open_tensors(blobs.path(found.digest))
    statistics = found.statistics_digest and open_tensors(blobs.path(found.statistics_digest))
    return ExportedVersion(found, record.arch, weights, statistics or {})


def require_whole(blobs: BlobStore, number: int, *digests: str | None) -> None:
    """A BlobError where one of a version's blobs is damaged.

    It is left where it is, for who can mend it.
    """
    for digest in digests:
        if digest is not None and not matches(blobs.read_unchecked(digest), digest):
            raise BlobError(
                f"{blobs.path(digest)}, of version {number}, is damaged; `shoal restore` a backup"
            )


def export_safetensors(version: ExportedVersion, path: Path) -> None:
    """Write parameters, then statistics, as one safetensors file in the place of another, or raise
    a StorageError.
    """
    write_atomically(
        path,
        encode_weights({**version.weights, **version.statistics}, version.metadata),
    )
