"""Carries out a rollout: announces the release to boards, and serves its files."""

import contextlib
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from broker_server.rounds.fleet import Fleet
from broker_server.rounds.run_context import ReleasedSet
from broker_server.service.blob_service import BlobService
from broker_server.service.rollout import read_rollout, store_rollout
from broker_server.service.rollout_state import Rollout
from broker_server.store import Store
from broker_server.store.remedies import REVOKED
from broker_server.store.task_table import Answer
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.errors import BlobError, ConfigError, StorageError
from fleet_protocol.identity.enrolment import Papers
from fleet_protocol.identity.release import Release
from fleet_protocol.manifest import parse_manifest

_LOOK_SECONDS = 1.0  # between two checks of the rollout and the boards
_JUDGE_SECONDS = 10.0  # between two checks of answers in rounds: a large fleet has many
# beginnings of the outcomes of boards that will not need the release again
_SETTLED = ("running", "failed", "proving")


@dataclass(frozen=True)
class _Observation:
    """A server's knowledge of its boards at one moment.

    Attributes:
        now: seconds since 1970.
        began: when the server began, in seconds since 1970.
        records: what each board reports about its release.
        online: boards that are online.
        paused: boards that pause.
        members: all members of the fleet; None if that is unknown.
        answers: answers of tasks since the server first received a message from each board's
            release.
    """

    now: float
    began: float
    records: Mapping[str, str]
    online: Collection[str]
    paused: Collection[str]
    members: Collection[str] | None
    answers: Collection[Answer]

    def apply(self, rollout: Rollout) -> Rollout:
        """Return a rollout updated to this moment."""
        asked = {}
        for name, asked_at in rollout.asked.items():
            if self.members is None or name in self.members:
                asked[name] = self._asked_at(rollout, name, asked_at)
        rollout = rollout.model_copy(update={"asked": asked})
        rollout = rollout.with_answers(self.records, self.now, self.answers)
        return rollout.advance(self.records, set(self.online) - set(self.paused), self.now)

    def _asked_at(self, rollout: Rollout, name: str, asked_at: float) -> float:
        """Return when a board was asked; one that could not answer in time gets its time again."""
        could_not_answer = name in self.paused or asked_at < self.began
        is_late = asked_at < self.now - rollout.within_seconds
        return self.now if could_not_answer and is_late and not rollout.stopped else asked_at


class RolloutService:
    """Announces the rollout to boards, and serves its files.

    Boards that are no longer members count as offline and are not asked.

    Args:
        folder: folder of the fleet.
        source: returns the operator's papers for each device.
        members: returns the ids of the fleet's members, or None if they are unknown.
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
        self._look_at = 0.0
        self._judge_at = 0.0
        self._papers = source()
        self._number = 0  # of the release whose sets have been read
        self._sets: Mapping[str, Sequence[ReleasedSet]] = {}
        self._passed = frozenset[str]()
        self._began = time.time()

    def papers(self) -> Mapping[str, bytes]:
        """Return the message to each device; the same object until it changes."""
        return self._papers

    def sets(self, device: str) -> Mapping[str, Sequence[ReleasedSet]]:
        """Return, by tier, the artifact sets of the rollout for a device, each before its plans.

        Only for a device on which they have passed and not failed since.
        """
        return self._sets if device in self._passed else {}

    def update(self, fleet: Fleet, blobs: BlobService, store: Store) -> bool:
        """Check the rollout and the boards, about once a second.

        Args:
            fleet: the boards.
            blobs: serves the files of the release from now on.
            store: contains the outcomes of the boards' tasks.

        Returns:
            Whether there are messages for boards.
        """
        if time.monotonic() < self._look_at:
            return False
        members = self._members()
        if members is not None:
            _note_members(members, fleet, blobs, store)
        self._look_at = time.monotonic() + _LOOK_SECONDS
        papers = dict(self._source())
        additions: dict[str, dict[str, str]] = {}  # fields of papers, by device
        for name, record in fleet.releases().items():
            # the board waits for the confirmation that the server has received its
            # message
            if record.startswith("trial "):
                additions[name] = {"heard": record.split(" ")[1]}
        is_awaited = False
        # There is no rollout, or it cannot be read now.
        with contextlib.suppress(BlobError, ConfigError, StorageError):
            rollout, states = self._follow_rollout(fleet, blobs, store, members)
            # A restarted board has forgotten the announcement.
            is_awaited = not all(state.startswith(_SETTLED) for state in states.values())
            if not rollout.stopped:
                for name in rollout.asked:
                    additions.setdefault(name, {})["release"] = rollout.signed
        _extend_papers(papers, additions)
        is_changed = papers != self._papers
        self._papers = papers
        return is_changed or is_awaited

    def _follow_rollout(
        self,
        fleet: Fleet,
        blobs: BlobService,
        store: Store,
        members: Collection[str] | None,
    ) -> tuple[Rollout, Mapping[str, str]]:
        """Update the rollout, and serve its files.

        Returns:
            The rollout, and the outcome of each board that was asked.

        Raises:
            BlobError: a manifest of the release is damaged.
            ConfigError: there is no rollout.
            StorageError: a file cannot be read or written.
        """
        rollout = read_rollout(self._folder)
        files = BlobStore(self._folder / "releases")
        self._read_sets(rollout.release, files)
        observation = self._observe(rollout, fleet, store, members)
        rollout = self._advance(rollout, observation)
        self._serve(rollout.release, files, blobs)
        states = rollout.outcomes(observation.records, observation.now)
        self._note_passed(rollout, states)
        return rollout, states

    def _read_sets(self, release: Release, files: BlobStore) -> None:
        if release.number == self._number:
            return
        sets = {}
        for tier in release.sets:
            variants = []
            for ref in release.manifests(tier):
                variants.append(ReleasedSet(parse_manifest(files.read(ref.digest)), ref))
            sets[tier] = variants
        # Only once all are read: one that cannot be read now is read again.
        self._sets = sets
        self._number = release.number

    def _observe(
        self, rollout: Rollout, fleet: Fleet, store: Store, members: Collection[str] | None
    ) -> _Observation:
        now = time.time()
        paused = set()
        for name, profile in fleet.profiles().items():
            if profile.unable.startswith("paused: "):
                paused.add(name)
        return _Observation(
            now=now,
            began=self._began,
            records=fleet.releases(sets=bool(rollout.release.sets)),
            online=fleet.online,
            paused=paused,
            members=members,
            answers=self._new_answers(rollout, store, now),
        )

    def _new_answers(self, rollout: Rollout, store: Store, now: float) -> Collection[Answer]:
        if rollout.stopped or now < self._judge_at:
            return []
        watched = {}
        for name, heard_at in rollout.heard.items():
            if now < heard_at + rollout.within_seconds:
                watched[name] = heard_at
        answers = store.answered_since(watched) if watched else []
        if answers:
            self._judge_at = now + _JUDGE_SECONDS
        return answers

    def _advance(self, rollout: Rollout, observation: _Observation) -> Rollout:
        if observation.apply(rollout) == rollout:
            return rollout
        # Read again under the lock: the operator may have changed it meanwhile.
        return store_rollout(self._folder, lambda: observation.apply(read_rollout(self._folder)))

    def _serve(self, release: Release, files: BlobStore, blobs: BlobService) -> None:
        refs = list(release.builds.values())
        for tier in release.sets:
            refs += release.manifests(tier)
        digests = [ref.digest for ref in refs]
        for variants in self._sets.values():
            for variant in variants:
                digests += [spec.digest for spec in variant.manifest.all_files]
        paths = {digest: files.path(digest) for digest in digests if files.has(digest)}
        blobs.serve(paths, refs[0].chunk_bytes)

    def _note_passed(self, rollout: Rollout, states: Mapping[str, str]) -> None:
        passed: list[str] = []
        if rollout.release.sets and not rollout.stopped:
            passed = [name for name, state in states.items() if state in {"running", "proving"}]
        self._passed = frozenset(passed)


def _extend_papers(papers: dict[str, bytes], additions: Mapping[str, Mapping[str, str]]) -> None:
    for name, fields in additions.items():
        if name in papers:
            extended = {**json.loads(papers[name]), **fields}
            papers[name] = Papers(**extended).to_bytes()


def _note_members(members: Collection[str], fleet: Fleet, blobs: BlobService, store: Store) -> None:
    """Count boards as offline that are no longer members, and as online those that are again."""
    for device in fleet.limit_to_members(members):
        is_member = device in members
        state = "idle" if is_member else REVOKED
        store.set_presence(device, state, online=fleet.is_online(device))
        if is_member:
            store.log("returned", f"{device} belongs to the fleet again", device=device)
        else:
            detail = f"{device} no longer belongs to the fleet, and counts as offline"
            store.log("dismissed", detail, device=device)
        blobs.forget(device)
