"""Reads a global version out of the store, and writes it as a file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from broker_server.store.promotion import promoted
from broker_server.store.queries import find_run
from broker_server.store.records import RunRecord, VersionRecord
from broker_server.store.repository import Store
from fleet_protocol.blob_store import BlobStore, write_atomically
from fleet_protocol.digests import matches
from fleet_protocol.errors import BlobError, ConfigError
from fleet_protocol.mapped_tensors import open_tensors
from fleet_protocol.weights import encode_weights


@dataclass(frozen=True)
class ExportedVersion:
    """A global version with its weights.

    Attributes:
        arch: name of the architecture.
        weights: its parameters, float32, in layout order.
        statistics: the statistics it was evaluated with, ``stat.<norm>.mean`` and ``.var``; empty
            if it has none.
    """

    record: VersionRecord
    arch: str
    weights: dict[str, NDArray[Any]]
    statistics: dict[str, NDArray[Any]]

    @property
    def metadata(self) -> dict[str, str]:
        """Its origin and its evaluation, as strings for a file's header."""
        metadata = {
            "arch": self.arch,
            "run": self.record.run,
            "version": str(self.record.number),
        }
        evaluation = self.record.evaluation
        if evaluation is not None:
            # `repr` gives the shortest text that reads back as the same number.
            metadata["loss"] = repr(evaluation.loss)
            for metric in evaluation.metrics:
                metadata[metric.name] = repr(metric.value)
            if evaluation.accuracy is not None:
                metadata["accuracy"] = repr(evaluation.accuracy)
        return metadata


def load_version(
    store: Store,
    run: str | None = None,
    version: int | None = None,
) -> ExportedVersion:
    """Read a global version of a run.

    Args:
        store: the store.
        run: id of the run or its beginning, by default the newest.
        version: number of the version; by default the promoted one, or else the last.

    Raises:
        ConfigError: the run or version does not exist, or its weights were removed.
        BlobError: its blob is damaged, or that of its statistics is missing.
    """
    run_record = find_run(store, run)
    record = _version_record(store, run_record, version)
    blobs = BlobStore(store.folder / "blobs")
    # The record stays when the weights of an old version are removed.
    if not blobs.has(record.digest):
        versions = store.versions(run_record.id)
        kept = [str(old.number) for old in versions if blobs.has(old.digest)]
        raise ConfigError(
            f"the weights of version {record.number} of run {run_record.id} are no longer in "
            f"{store.folder}; those of {', '.join(kept) or 'none'} are (keep_versions sets "
            "how many stay)"
        )
    # A file that was damaged on disk must not be exported.
    require_whole(
        blobs,
        record.number,
        record.digest,
        record.statistics_digest,
    )
    weights = open_tensors(blobs.path(record.digest))
    statistics = {}
    if record.statistics_digest:
        statistics = open_tensors(blobs.path(record.statistics_digest))
    return ExportedVersion(
        record,
        run_record.arch,
        weights,
        statistics,
    )


def _version_record(
    store: Store,
    run: RunRecord,
    number: int | None,
) -> VersionRecord:
    # Without a number, the promoted version is the default.
    if number is None:
        promoted_version = promoted(store, run.id)
        if promoted_version is not None:
            return promoted_version
    record = store.version(run.id, number)
    if record is None:
        last = store.version(run.id)
        range_words = f"it has versions 0 to {last.number}" if last is not None else "it has none"
        raise ConfigError(f"run {run.id} has no version {number}; {range_words}")
    return record


def require_whole(
    blobs: BlobStore,
    number: int,
    *digests: str | None,
) -> None:
    """Refuse a version if one of its blobs is damaged.

    The blob stays, for a user who can repair it.

    Raises:
        BlobError: a blob does not match its digest.
    """
    for digest in digests:
        if digest is not None and not matches(blobs.read_unchecked(digest), digest):
            raise BlobError(
                f"{blobs.path(digest)}, of version {number}, is damaged; `shoal restore` a backup"
            )


def export_safetensors(version: ExportedVersion, path: Path) -> None:
    """Write parameters, then statistics, as one safetensors file, replacing an existing one.

    Raises:
        StorageError: the file cannot be written.
    """
    tensors = {**version.weights, **version.statistics}
    write_atomically(path, encode_weights(tensors, version.metadata))
