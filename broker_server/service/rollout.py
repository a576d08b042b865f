"""A release on its way to a fleet: to a few boards first, to more while these do well, to no more
where they do not.

The operator signs it and says how it goes, in rollout.json of the fleet's folder; there the server
keeps how far it is.
"""

import contextlib
import json
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from pydantic import ValidationError

from broker_server.rounds.artifacts import Artifacts
from broker_server.rounds.fleet import Fleet
from broker_server.service.authority import changing, sign_release
from broker_server.service.blob_service import BlobService
from broker_server.store import Store, TaskPhase
from broker_server.store.remedies import REVOKED
from broker_server.store.task_table import Answer
from fleet_protocol.blob_store import BlobStore, write_atomically
from fleet_protocol.blobs import blob_ref
from fleet_protocol.digests import blob_digest, matches
from fleet_protocol.errors import BlobError, ConfigError, StorageError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.identity.enrolment import Papers
from fleet_protocol.identity.release import Release
from fleet_protocol.manifest import Manifest, parse_manifest
from fleet_protocol.messages import BlobRef

_LOOK_SECONDS = 1.0
# These do not depend on the releases that boards run.
_EXCUSED = (
    "busy",
    "data-changed",
    "data-mismatch",
    "late",
    "no-data",
    "no-space",
    "too-far",
)


class Rollout(FrozenModel):
    """How a release goes to a fleet, and how far it is.

    Attributes:
        release: what the operator signed; `signed` is how it travels.
        stages: shares of the boards that are asked, one after the other, each when all before have
            ended.
        within_seconds: after which a board that is not back with it has failed.
        most_failed: share of the boards asked that may fail; with more it stops.
        gate: so many training tasks each must have finished with it before the next are asked.
        asked: when each board was asked, seconds since 1970.
        heard: when each board that runs it was first heard to.
        judged: of boards that run it, why one has failed in a round since, empty for one that is
            through the gate.
        paused: whether nobody is asked for now.
        stopped: why nobody is asked any more; empty while it goes on.
        told: what boards asked said last of this release, which they forget with the next.
        ended: when another took its place, seconds since 1970; 0 while none has.
    """

    release: Release
    signed: str
    stages: tuple[float, ...]
    within_seconds: float
    most_failed: float
    gate: int = 0
    asked: Mapping[str, float] = {}
    heard: Mapping[str, float] = {}
    judged: Mapping[str, str] = {}
    paused: bool = False
    stopped: str = ""
    told: Mapping[str, str] = {}
    ended: float = 0.0

    @property
    def state(self) -> str:
        """``going``, ``paused``, ``stopped``, or ``replaced`` by another."""
        return (
            "replaced"
            if self.ended
            else "stopped"
            if self.stopped
            else "paused"
            if self.paused
            else "going"
        )

    def _heard(self, records: Mapping[str, str]) -> Mapping[str, str]:
        own = str(self.release.number)
        new = {
            name: line
            for name, line in records.items()
            if name in self.asked and line.split(" ")[1] == own
        }
        return {**self.told, **new}

    def after(
        self, records: Mapping[str, str], now: float, answers: Collection[Answer]
    ) -> "Rollout":
        """The same, with what boards told last, and what became of tasks planned since each was
        heard.
        """
        judged = dict(self.judged)
        told = self._heard(records)
        heard = {name: now for name in self.asked if told.get(name, "").startswith("running")} | {
            **self.heard
        }
        for name, phase, why in answers:
            if phase in {TaskPhase.DECLINED, TaskPhase.REFUSED} and not str(why).startswith(
                _EXCUSED
            ):
                judged[name] = f"in a round: {why}"
        done = Counter(
            name for name, phase, _ in answers if phase.value in {"merged", "left-out", "refused"}
        )
        passed = {name: "" for name, count in done.items() if count >= self.gate}
        return self.model_copy(update={"heard": heard, "judged": {**passed, **judged}})

    def outcomes(self, records: Mapping[str, str], now: float) -> dict[str, str]:
        """What became of each board asked: ``running``, ``proving`` to the gate, ``failed: why``,
        or how far it is.
        """
        found = {}
        told = self._heard(records)
        now = self.ended or now
        for name, asked in self.asked.items():
            phase, *why = told.get(name, "asked").split(" ", 4)
            if phase == "running" and (self.gate or name in self.judged):
                why = [self.judged.get(name, "")]
                phase = "failed" if why[0] else "running" if name in self.judged else "proving"
            late = phase != "running" and now > asked + self.within_seconds
            found[name] = (
                f"failed: {why[-1]}"
                if phase == "failed"
                else "failed: not back in time"
                if late
                else phase
            )
        return found

    def advanced(
        self, records: Mapping[str, str], online: Collection[str], now: float
    ) -> "Rollout":
        """The same a moment later: stopped, or with the boards of its next stage asked."""
        states = self.outcomes(records, now)
        told = self._heard(records)
        failed = [f"{name} {said}" for name, said in states.items() if said.startswith("failed")]
        if self.stopped or len(failed) > self.most_failed * len(states):
            why = self.stopped or f"{len(failed)} of {len(states)} boards: {failed[0]}"
            return self.model_copy(update={"stopped": why, "told": told})
        if self.paused or len(failed) + [*states.values()].count("running") < len(states):
            return self.model_copy(update={"told": told})
        there = {
            blob_digest(f"{self.signed}{name}".encode()): name
            for name in {*online} & records.keys() - states
        }
        aims = [math.ceil(round(share * len(records), 9)) - len(states) for share in self.stages]
        more = next((aim for aim in aims if aim > 0), 0)
        asked = dict.fromkeys([there[digest] for digest in sorted(there)][:more], now)
        return self.model_copy(update={"asked": {**self.asked, **asked}, "told": told})


# What an operator does with a rollout: the states in which he can, and what changes.
VERBS: Mapping[str, tuple[Collection[str], Mapping[str, str | bool]]] = MappingProxyType({
    "pause": (("going",), {"paused": True}),  # those that were asked go on
    "resume": (("paused",), {"paused": False}),
    "stop": (("going", "paused"), {"stopped": "the operator stopped it"}),
})  # fmt: skip


@dataclass(frozen=True)
class RolloutView:
    """A rollout, its state, and the `VERBS` that can be done now.

    Attributes:
        boards: what became of each board, ``not asked`` or as of `Rollout.outcomes`; once replaced,
            of those asked.
        versions: of Shoal, as boards said last.
    """

    rollout: Rollout
    state: str
    verbs: tuple[str, ...]
    boards: Mapping[str, str]
    versions: Mapping[str, str]


def _files_of(release: Release, sets: Mapping[str, tuple[Manifest, BlobRef]]) -> list[str]:
    """Digests of all that boards may ask for of a release, with the manifests of its artifact sets."""
    digests = [ref.digest for ref in (*release.builds.values(), *release.sets.values())]
    for manifest, _ in sets.values():
        digests += [spec.digest for spec in manifest.all_files]
    return digests


def view_of(rollout: Rollout, store: Store) -> RolloutView:
    """How far a rollout is, by what the devices of a store said last."""
    known = {
        device.id: device.profile
        for device in store.devices(rollout.release.fleet)
        if device.profile is not None
    }
    sets = bool(rollout.release.sets)
    found = {name: profile.sets if sets else profile.release for name, profile in known.items()}
    records = {name: line for name, line in found.items() if line}
    boards = dict.fromkeys(() if rollout.ended else records, "not asked") | rollout.outcomes(
        records, time.time()
    )
    verbs = tuple(verb for verb, (states, _) in VERBS.items() if rollout.state in states)
    versions = {name: profile.runtime_version for name, profile in known.items() if name in boards}
    return RolloutView(rollout, rollout.state, verbs, boards, versions)


def rollouts(store: Store) -> list[RolloutView]:
    """Those of the fleet in whose folder a store lies, the newest first.

    A StorageError where one is damaged.
    """
    folder = store.folder.resolve().parent
    past = sorted(
        (folder / "rollouts").glob("*.json"), reverse=True
    )  # numbers are times, of ten digits
    try:
        found = [
            Rollout.model_validate_json(path.read_bytes())
            for path in (*folder.glob("rollout.json"), *past)
        ]
    except (OSError, ValidationError) as error:
        text = f"a rollout in {folder} is damaged; remove its rollouts folder, or begin anew with `shoal rollout start`"
        raise StorageError(text) from error
    return [view_of(rollout, store) for rollout in found]


def read_rollout(folder: Path) -> Rollout:
    """The newest of a fleet's folder; a ConfigError where there is none."""
    try:
        return Rollout.model_validate_json((folder / "rollout.json").read_bytes())
    except (OSError, ValidationError) as error:
        raise ConfigError(
            f"{folder} has no rollout; begin one with `shoal rollout start`"
        ) from error


def keep_rollout(folder: Path, change: Callable[[], Rollout]) -> Rollout:
    """Keep what a change makes, one at a time.

    A ConfigError or StorageError where that cannot be.
    """
    with changing(folder):
        new = change()
        write_atomically(folder / "rollout.json", new.model_dump_json(indent=1).encode())
        return new


def steer_rollout(folder: Path, verb: str) -> Rollout:
    """Do one of `VERBS` with the newest.

    A ConfigError where its state forbids it, else errors as of `keep_rollout`.
    """

    def change() -> Rollout:
        old, (states, changes) = read_rollout(folder), VERBS[verb]
        if old.state not in states:
            raise ConfigError(
                f"release {old.release.number} is {old.state}: {old.stopped}; nothing is left to {verb}"
            )
        return old.model_copy(update=changes)

    return keep_rollout(folder, change)


def begin(
    folder: Path,
    builds: Mapping[str, bytes],
    days: int,
    sets: Artifacts | None = None,
    **how: object,
) -> Rollout:
    """Sign a release of some builds, by kind of board, or of sets, and roll it out.

    Errors as of `keep_rollout`.

    Boards take it for so many days, 0 for ever; the rest is of `Rollout`.
    """
    refs = {kind: blob_ref(data) for kind, data in builds.items()}
    old = None
    with contextlib.suppress(ConfigError):
        old = read_rollout(folder)
    manifests = {} if sets is None else {tier: item.ref for tier, item in sets.tiers.items()}
    release, signed = sign_release(folder, refs, manifests, days, old.release.number if old else 0)
    rollout = Rollout.model_validate({"release": release, "signed": signed, **how})
    if old is not None:
        (folder / "rollouts").mkdir(exist_ok=True)
        over = old.model_copy(update={"ended": time.time()})
        write_atomically(folder / "rollouts" / f"{old.release.number}.json", over.to_bytes())
    shutil.rmtree(folder / "releases", ignore_errors=True)  # the files of the one before
    store = BlobStore(folder / "releases")
    for data in builds.values():
        store.put(data)
    files = {} if sets is None else sets.files
    for digest, path in files.items():  # whose digests may be of the older form
        data = path.read_bytes()
        if not matches(data, digest):
            raise BlobError(f"{path} changed while it was read; start the rollout again")
        store.keep(digest, data)
    store.sync(files)
    return keep_rollout(folder, lambda: rollout)


class Carrier:
    """Tells boards of the rollout, and serves its files.

    `source` is what the operator says besides.

    Boards that are not among `members` any more, None where nobody knows, count as away and are not
    asked.
    """

    def __init__(
        self,
        folder: Path,
        source: Callable[[], Mapping[str, bytes]],
        members: Callable[[], Collection[str] | None] = lambda: None,
    ) -> None:
        self._members = members
        self._folder = folder
        self._source = source
        self._next = 0.0
        self._judge = 0.0
        self._papers = source()
        self._number = 0
        self._passed = frozenset[str]()
        self._sets: Mapping[str, tuple[Manifest, BlobRef]] = {}
        self._began = time.time()

    def papers(self) -> Mapping[str, bytes]:
        """What is said to each device; the same object until it is another."""
        return self._papers

    def sets(self, device: str) -> Mapping[str, tuple[Manifest, BlobRef]]:
        """By tier, the artifact sets of the rollout for a device on which they have passed and not
        failed since.
        """
        return self._sets if device in self._passed else {}

    def turn(self, fleet: Fleet, blobs: BlobService, store: Store) -> bool:
        """Look once a second, and say whether boards are to be told something else."""
        if time.monotonic() < self._next:
            return False
        members = self._members()
        for device in fleet.limit_to_members(members) if members is not None else ():
            left = members is None or device not in members
            store.set_presence(device, REVOKED if left else "idle", online=fleet.is_online(device))
            what = "no member any more, and counts as away" if left else "a member again"
            store.log(
                "dismissed" if left else "returned",
                f"{device} is {what}",
                device=device,
            )
            blobs.forget(device)
        self._next, records, papers = (
            time.monotonic() + _LOOK_SECONDS,
            fleet.releases(),
            dict(self._source()),
        )
        waits = False  # boards that start anew have forgotten what they were told
        said = {
            name: {"heard": line.split(" ")[1]}
            for name, line in records.items()
            if line.startswith("trial ")
        }
        with contextlib.suppress(
            BlobError, ConfigError, StorageError
        ):  # there is none, or it cannot be read now
            old, now = read_rollout(self._folder), time.time()
            files = BlobStore(self._folder / "releases")
            if old.release.number != self._number:
                sets = old.release.sets.items()
                self._sets = {
                    tier: (parse_manifest(files.read(ref.digest)), ref) for tier, ref in sets
                }
                self._number = old.release.number
            records = fleet.releases(sets=bool(old.release.sets))
            paused = {
                name
                for name, profile in fleet.profiles().items()
                if profile.unable.startswith("paused: ")
            }
            watched = {
                name: at
                for name, at in old.heard.items()
                if now < at + old.within_seconds and not old.stopped
            }
            answers = store.answered_since(watched) if watched and now >= self._judge else []
            self._judge = now + 10.0 if answers else self._judge  # of a large fleet there are many

            def moved(rollout: Rollout) -> Rollout:
                late = now - rollout.within_seconds if not rollout.stopped else 0.0
                # a board that pauses, and one that no server was there for, has its time again
                asked = {
                    name: now if at < late and (name in paused or at < self._began) else at
                    for name, at in rollout.asked.items()
                    if members is None or name in members
                }
                known = rollout.model_copy(update={"asked": asked}).after(records, now, answers)
                return known.advanced(records, {*fleet.online} - paused, now)

            if moved(old) != old:
                old = keep_rollout(self._folder, lambda: moved(read_rollout(self._folder)))
            there = [digest for digest in _files_of(old.release, self._sets) if files.has(digest)]
            (ref, *_) = (*old.release.builds.values(), *old.release.sets.values())
            blobs.serve({digest: files.path(digest) for digest in there}, ref.chunk_bytes)
            states = old.outcomes(records, now)
            waits = not all(
                each.startswith(("running", "failed", "proving")) for each in states.values()
            )
            passed = [name for name, state in states.items() if state in {"running", "proving"}]
            self._passed = frozenset(() if old.stopped or not old.release.sets else passed)
            for name in old.asked if not old.stopped else ():
                said[name] = {**said.get(name, {}), "release": old.signed}
        for name in said.keys() & papers.keys():
            papers[name] = Papers(**{**json.loads(papers[name]), **said[name]}).to_bytes()
        changed = papers != self._papers
        self._papers = papers
        return changed or waits
