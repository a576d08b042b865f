"""Promotes a global version of a run, or lets the run continue from an earlier one.

The log of the store records which version was promoted. A version that repeats an earlier one has
the round that made the earlier one.
"""

import time
from dataclasses import replace

from broker_server.store.records import VersionRecord
from broker_server.store.repository import Store
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.errors import ConfigError

_PROMOTED = "promoted"


def promoted(store: Store, run: str) -> VersionRecord | None:
    """Return the version of a run that was promoted last; None if none was."""
    # The log line has no device, and the number of its round.
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
    # A version that repeats another has its round, so the first one of a round is the original.
    original = _first_of_round(versions, newest.round)
    if original is not None and original.number != newest.number:
        numbers["repeats"] = original.number
    promoted_version = promoted(store, run)
    if promoted_version is not None:
        numbers["promoted"] = promoted_version.number
    return numbers


def promote(store: Store, version: VersionRecord) -> VersionRecord:
    """Make a version the default for exports, and keep its weights.

    Its run continues as before.
    """
    detail = f"version {version.number} is the one to use"
    store.log(_PROMOTED, detail, run=version.run, number=version.round)
    return version


def roll_back(store: Store, version: VersionRecord) -> VersionRecord:
    """Let the next round of a run start from an earlier version.

    Returns:
        The new version that repeats it.

    Raises:
        ConfigError: the state that belongs to the version was removed, or the run is in progress.
    """
    # The next round needs the state of the method or of the server's optimizer, too.
    state = version.state_digest
    if state is not None and not BlobStore(store.folder / "blobs").has(state):
        raise ConfigError(
            f"version {version.number} of run {version.run} has its weights, but the state "
            "of its method or server optimizer was removed, so the run cannot continue from "
            "it; begin another from its weights: `shoal export-weights --version "
            f"{version.number}`, and model.weights = that file"
        )
    newest = store.versions(version.run)[-1]
    # A new number, so that later versions stay in the store.
    copy = replace(version, number=newest.number + 1, created_at=time.time())
    # The check and the insertion are one transaction.
    if not store.repeat_version(copy):
        raise ConfigError(
            f"run {version.run} is in progress; hold it with `shoal pause` (its server must "
            "be running), roll back once `shoal runs` shows it as paused, and continue it "
            "with `shoal resume`"
        )
    detail = f"version {copy.number} repeats version {version.number}"
    store.log("rolled-back", detail, run=copy.run, number=copy.round)
    return copy


def _first_of_round(versions: list[VersionRecord], number: int) -> VersionRecord | None:
    """Return the version that a round made, which others may repeat."""
    for version in versions:
        if version.round == number:
            return version
    return None
