"""Which global version of a run counts: the one that is promoted, and an earlier one to go on from.

The log of the store says what was promoted. A version that repeats an earlier one has the round
that made that one.
"""

import time
from dataclasses import replace

from broker_server.store.records import VersionRecord
from broker_server.store.repository import Store
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.errors import ConfigError

_PROMOTED = "promoted"


def promoted(store: Store, run: str) -> VersionRecord | None:
    """The version of a run that was promoted last, None where none was."""
    made_by = store.marked_rounds(run, _PROMOTED).get(None)
    return (
        None
        if made_by is None
        else next((item for item in store.versions(run) if item.round == made_by), None)
    )


def marked_versions(store: Store, run: str) -> dict[str, int]:
    """Which versions of a run count: the newest, the earlier one that it repeats if it does, and
    one promoted.
    """
    versions = store.versions(run)
    found = promoted(store, run)
    known = {"newest": versions[-1].number}
    if (
        first := next(item.number for item in versions if item.round == versions[-1].round)
    ) != known["newest"]:
        known["repeats"] = first
    return known if found is None else {**known, "promoted": found.number}


def promote(store: Store, version: VersionRecord) -> VersionRecord:
    """Make a version the one that is exported by default, and keep its weights.

    Its run goes on as it does.
    """
    store.log(
        _PROMOTED,
        f"version {version.number} is the one to use",
        run=version.run,
        number=version.round,
    )
    return version


def roll_back(store: Store, version: VersionRecord) -> VersionRecord:
    """Let the next round of a run start from an earlier version, which is repeated as the newest
    and returned.

    A ConfigError says that what belongs to the version is not kept, or that the run is going on.
    """
    if version.state_digest is not None and not BlobStore(store.folder / "blobs").has(
        version.state_digest
    ):
        raise ConfigError(
            f"version {version.number} of run {version.run} has its weights, but no longer what its method or server"
            " optimizer kept beside them, so the run cannot go on from it; begin another from its weights: `shoal"
            f" export-weights --version {version.number}`, and model.weights = that file"
        )
    copy = replace(
        version,
        number=store.versions(version.run)[-1].number + 1,
        created_at=time.time(),
    )
    if not store.repeat_version(copy):
        raise ConfigError(
            f"run {version.run} is going on; hold it with `shoal pause` (its server must be up), go back once `shoal"
            " runs` shows it as paused, and let it go on with `shoal resume`"
        )
    detail = f"version {copy.number} is version {version.number} again"
    store.log("rolled-back", detail, run=copy.run, number=copy.round)
    return copy
