"""The rollouts of a fleet as files in its folder: started, controlled, read and displayed.

The operator signs a release and defines how it reaches the fleet, in rollout.json of the fleet's
folder; the server records its progress there.
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from broker_server.rounds.artifacts import Artifacts
from broker_server.service.authority import changing, sign_release
from broker_server.service.rollout_state import VERBS, Rollout
from broker_server.store import Store
from fleet_protocol.blob_store import BlobStore, write_atomically
from fleet_protocol.blobs import blob_ref
from fleet_protocol.digests import matches
from fleet_protocol.errors import BlobError, ConfigError, StorageError
from fleet_protocol.foreign_files import read_regular
from fleet_protocol.messages import BlobRef


@dataclass(frozen=True)
class RolloutView:
    """A rollout, its state, and the `VERBS` that are possible now.

    Attributes:
        rollout: the stored rollout.
        state: from `Rollout.state`.
        verbs: the actions that are possible now.
        boards: the state of each board, ``not asked`` or as in `Rollout.outcomes`; of a replaced
            rollout, only of those asked.
        versions: versions of Shoal, as boards last reported them.
    """

    rollout: Rollout
    state: str
    verbs: tuple[str, ...]
    boards: Mapping[str, str]
    versions: Mapping[str, str]


def view_rollout(rollout: Rollout, store: Store) -> RolloutView:
    """Return the progress of a rollout, from the last reports of the devices in a store."""
    profiles = {}
    records = {}
    for device in store.devices(rollout.release.fleet):
        profile = device.profile
        if profile is None:
            continue
        profiles[device.id] = profile
        # Boards report their artifact sets separately from their runtime.
        record = profile.sets if rollout.release.sets else profile.release
        if record:
            records[device.id] = record
    boards = {} if rollout.ended else dict.fromkeys(records, "not asked")
    boards |= rollout.outcomes(records, time.time())
    verbs = tuple(verb for verb, (states, _) in VERBS.items() if rollout.state in states)
    versions = {
        name: profile.runtime_version for name, profile in profiles.items() if name in boards
    }
    return RolloutView(rollout, rollout.state, verbs, boards, versions)


def read_rollouts(store: Store) -> list[RolloutView]:
    """Return the rollouts of the fleet whose folder contains a store, the newest first.

    Raises:
        StorageError: one is damaged.
    """
    folder = store.folder.resolve().parent
    # Their names are numbers, times of ten digits, which sort correctly as text, too.
    past = sorted((folder / "rollouts").glob("*.json"), reverse=True)
    paths = [*folder.glob("rollout.json"), *past]
    try:
        # In a folder that somebody has packed, a pipe would hold a thread of the page.
        rollouts = [Rollout.model_validate_json(read_regular(path)) for path in paths]
    except (BlobError, ValidationError) as error:
        raise StorageError(
            f"a rollout in {folder} is damaged; remove its rollouts folder, or start again "
            "with `shoal rollout start`"
        ) from error
    return [view_rollout(rollout, store) for rollout in rollouts]


def read_rollout(folder: Path) -> Rollout:
    """Return the newest rollout of a fleet's folder.

    Raises:
        ConfigError: it has none.
    """
    try:
        return Rollout.model_validate_json(read_regular(folder / "rollout.json"))
    except (BlobError, ValidationError) as error:
        raise ConfigError(
            f"{folder} has no rollout; start one with `shoal rollout start`"
        ) from error


def store_rollout(folder: Path, change: Callable[[], Rollout]) -> Rollout:
    """Store the result of a change; changes of several processes happen one after the other.

    Args:
        folder: folder of the fleet.
        change: reads the newest rollout, if it needs it, and returns the one to store.

    Raises:
        ConfigError: another process is changing the folder.
        StorageError: the disk cannot be written.
    """
    with changing(folder):
        rollout = change()
        write_atomically(folder / "rollout.json", rollout.model_dump_json(indent=1).encode())
        return rollout


def steer_rollout(folder: Path, verb: str) -> Rollout:
    """Apply one of `VERBS` to the newest rollout.

    Raises:
        ConfigError: its state forbids it, or see `store_rollout`.
        StorageError: see `store_rollout`.
    """
    states, changes = VERBS[verb]

    def change() -> Rollout:
        rollout = read_rollout(folder)
        if rollout.state not in states:
            raise ConfigError(
                f"release {rollout.release.number} is {rollout.state}: {rollout.stopped}; nothing "
                f"is left to {verb}"
            )
        return rollout.model_copy(update=changes)

    return store_rollout(folder, change)


def start_rollout(
    folder: Path,
    builds: Mapping[str, bytes],
    days: int,
    sets: Artifacts | None = None,
    **how: object,
) -> Rollout:
    """Sign a release and roll it out.

    Args:
        folder: folder of the fleet.
        builds: runtimes, by kind of board.
        days: days for which boards accept it, 0 for no limit.
        sets: artifact sets, instead of builds.
        how: fields of `Rollout`.

    Raises:
        BlobError: a file of the sets changed while it was read.
        ConfigError: see `store_rollout`.
        StorageError: see `store_rollout`.
    """
    refs = {kind: blob_ref(data) for kind, data in builds.items()}
    before = None
    with contextlib.suppress(ConfigError):
        before = read_rollout(folder)
    manifests: dict[str, list[BlobRef]] = {}
    if sets is not None:
        for tier, tier_set in sets.tiers.items():
            manifests[tier] = [variant.ref for variant in tier_set.variants]
    number = before.release.number if before else 0
    release, signed = sign_release(folder, refs, manifests, days, number)
    rollout = Rollout.model_validate({"release": release, "signed": signed, **how})
    if before is not None:
        _archive(folder, before)
    shutil.rmtree(folder / "releases", ignore_errors=True)  # the files of the previous rollout
    _store_files(BlobStore(folder / "releases"), builds, sets)
    # Last: the files that rollout.json names must exist when a server reads it.
    return store_rollout(folder, lambda: rollout)


def _archive(folder: Path, rollout: Rollout) -> None:
    (folder / "rollouts").mkdir(exist_ok=True)
    ended = rollout.model_copy(update={"ended": time.time()})
    write_atomically(folder / "rollouts" / f"{rollout.release.number}.json", ended.to_bytes())


def _store_files(files: BlobStore, builds: Mapping[str, bytes], sets: Artifacts | None) -> None:
    for data in builds.values():
        files.put(data)
    if sets is None:
        return
    for digest, path in sets.files.items():
        data = path.read_bytes()
        if not matches(data, digest):
            raise BlobError(f"{path} changed while it was read; start the rollout again")
        files.keep(digest, data)  # under its own digest, which may be of the older form
    files.sync(sets.files)
