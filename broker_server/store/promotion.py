"""Promote a global version of a run, or let the run continue from an earlier one.

The log of the store says which version was promoted. A version that repeats an earlier one has the
round that made that one.
"""

import time
from dataclasses import replace

from broker_server.store.records import VersionRecord
from broker_server.store.repository import Store
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.errors import ConfigError

_PROMOTED = "promoted"


def promoted(store: Store, run: str) -> VersionRecord | None:
    """Return the version of a run that was promoted last, None if none was."""
    promoted_round = store.marked_rounds(run, _PROMOTED).get(None)
    if promoted_round is None:
        return None
    return _first_of_round(store.versions(run), promoted_round)


def marked_versions(store: Store, run: str) -> dict[str, int]:
    """Return the numbers of the versions of a run that matter most.

    Returns:
        The ``newest``; the earlier one that it ``repeats``, if it does; and the ``promoted`` one,
        if there is one.
    """
    versions = store.versions(run)
    newest = versions[-1]
    numbers = {"newest": newest.number}
    original = _first_of_round(versions, newest.round)
    if original is not None and original.number != newest.number:
        numbers["repeats"] = original.number
    promoted_version = promoted(store, run)
    if promoted_version is not None:
        numbers["promoted"] = promoted_version.number
    return numbers


def promote(store: Store, version: VersionRecord) -> VersionRecord:
    """Make a version the one that is exported by default, and keep its weights.

    Its run goes on as before.
    """
    detail = f"version {version.number} is the one to use"
    store.log(_PROMOTED, detail, run=version.run, number=version.round)
    return version


def roll_back(store: Store, version: VersionRecord) -> VersionRecord:
    """Let the next round of a run start from an earlier version.

    Returns:
        The new version that repeats it.

    Raises:
        ConfigError: the state that belongs to the version is not kept, or the run is going on.
    """
    state = version.state_digest
    if state is not None and not BlobStore(store.folder / "blobs").has(state):
        raise ConfigError(
            f"version {version.number} of run {version.run} has its weights, but no longer what its"
            " method or server optimizer kept beside them, so the run cannot go on from it; begin"
            f" another from its weights: `shoal export-weights --version {version.number}`, and"
            " model.weights = that file"
        )
    newest = store.versions(version.run)[-1]
    copy = replace(version, number=newest.number + 1, created_at=time.time())
    if not store.repeat_version(copy):
        raise ConfigError(
            f"run {version.run} is going on; hold it with `shoal pause` (its server must be up), go"
            " back once `shoal runs` shows it as paused, and let it go on with `shoal resume`"
        )
    detail = f"version {copy.number} is version {version.number} again"
    store.log("rolled-back", detail, run=copy.run, number=copy.round)
    return copy


def _first_of_round(versions: list[VersionRecord], number: int) -> VersionRecord | None:
    """Return the version that a round made, which others may repeat."""
    for version in versions:
        if version.round == number:
            return version
    return None
