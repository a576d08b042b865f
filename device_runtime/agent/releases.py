"""The releases of a board's runtime and artifact sets: which is active, which is on trial.

The launcher (`launch`, which a bundle installs and no release replaces) reads and changes
the same record, one line of PHASE NUMBER BEFORE STARTS WHY, because a runtime that does not start
cannot. Renaming that file switches the runtime.

For artifact sets the record lists which have passed their test on this board. The server names sets
in tasks, and may name others.
"""

import contextlib
import math
import os
import re
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from device_runtime.agent.cache import read_index
from device_runtime.settings import DeviceConfig
from device_runtime.training.choosers.rule import within
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.messages.values import RELEASE_PATTERN, BlobRef
from fleet_protocol.transport import OperatorNotice

if TYPE_CHECKING:
    from fleet_protocol.identity.release import Release

RESTART = 75  # exit code of an agent that ends for another runtime to start (EX_TEMPFAIL)
INITIAL_RECORD = "running 0 0 0"  # of a board as it was installed
# A new release must reach a server within the time of so many attempts to connect.
_TRIES = 10

# fmt: off
TRANSITIONS: Mapping[tuple[str, str], str] = MappingProxyType({
    # from      event       to           moved by
    ("running", "whole"):  "fetched",  # the agent has verified the file, WHY, and ends
    ("failed",  "whole"):  "fetched",
    ("running", "unfit"):  "failed",   # the agent cannot take it; the server receives WHY
    ("failed",  "unfit"):  "failed",
    ("running", "passed"): "running",  # the artifact sets have passed their self-test
    ("failed",  "passed"): "running",
    ("fetched", "tested"): "trial",    # the launcher has unpacked it, and its self-test has passed
    ("fetched", "broken"): "failed",   # it failed, or crashed the board three times
    ("trial",   "heard"):  "running",  # the server has received its first message
    # No server has in time, or the agent on trial ended by itself three times; BEFORE runs.
    ("trial",   "silent"): "failed",
    # While a release is on trial or fetched, nothing newer is taken: only one earlier release is
    # kept.
})
# fmt: on


class Releases:
    """The record of the active release, and the release to fetch.

    Without a launcher, which names the record's folder, there is none.

    Attributes:
        record: the line as it is on disk; None without a launcher.
        sets: the same for artifact sets; None if no operator signs them.
        wanted: the release to fetch, signed by the operator, and its file for this board; for
            artifact sets, the manifest of a set or of a plan.
        trial_ends_at: ``time.monotonic()`` at which a trial ends; infinite without one.
        restarts: whether the agent ends for another runtime to start.
    """

    def __init__(self, config: DeviceConfig) -> None:
        folder = os.environ.get("SHOAL_RELEASES")
        self._config = config
        self._path = Path(folder) / "record" if folder else None
        self._sets_path = config.state_dir / "sets-record" if config.identity else None
        self.record = _read(self._path)
        self.sets = _read(self._sets_path)
        self.wanted: tuple[Release, BlobRef] | None = None
        self._smaller: tuple[BlobRef, ...] = ()  # files that need less memory than the wanted one
        self.restarts = False
        self.trial_ends_at = math.inf
        if self._on_trial:
            self.trial_ends_at = time.monotonic() + _TRIES * config.connect_timeout_seconds

    @property
    def _on_trial(self) -> bool:
        return _is_trial(self.record)

    def receive(self, news: OperatorNotice) -> None:
        """Handle a release that the operator announces.

        Raises:
            RefusedError: it is older than a release that the board already knows.
            StorageError: the record cannot be written.
        """
        # It needs cryptography, whose memory small boards need for other tasks.
        from fleet_protocol.identity.release import Release  # noqa: PLC0415

        release = news.release if isinstance(news.release, Release) else None
        before = self.wanted
        self.wanted = None
        # Only one earlier release is kept, so nothing newer is taken until the server has received
        # a message from this one.
        if self._on_trial:
            if news.heard == _number_of(str(self.record)):
                self.move("heard")
            return
        if release is None:
            return
        record = self.sets if release.sets else self.record
        if record is None:
            return
        newest_number = _number_of(record)
        # An older release with a valid signature must not bring its faults back.
        if release.number < newest_number:
            raise RefusedError(
                RefusalReason.REPLAYED,
                f"release {release.number} is older than release {newest_number}, which this "
                "board knows",
            )
        if release.number > newest_number:
            self._consider(release, before)

    def _consider(self, release: "Release", before: "tuple[Release, BlobRef] | None") -> None:
        """Accept a new release, or record why this board cannot take it.

        Args:
            release: the release.
            before: the value of `wanted` before the release was announced, perhaps once more.
        """
        refs = self._files_for_board(release)
        size = max((ref.size for ref in refs), default=0)
        if not refs:
            self._decline(release, self._why_none(release))
        elif 0 < release.expires < time.time():
            self._decline(
                release, "it has expired; the operator can sign it again with a new rollout"
            )
        elif size > self._config.max_cache_bytes:
            self._decline(release, f"its {size} bytes are more than max_cache_bytes")
        elif before is not None and before[0] == release:
            self.wanted = before  # the board continues with the file that it already fetches
        else:
            self.wanted = (release, refs[0])
            self._smaller = refs[1:]

    def want_less_memory(self) -> bool:
        """Want the next file of the release, which needs less memory; return whether there is one.

        The order of the files is the operator's: the fastest first.
        """
        if self.wanted is None or not self._smaller:
            return False
        release, _ = self.wanted
        self.wanted = (release, self._smaller[0])
        self._smaller = self._smaller[1:]
        return True

    def _files_for_board(self, release: "Release") -> tuple[BlobRef, ...]:
        from fleet_protocol.identity.release import board_kind  # noqa: PLC0415  (as in receive)

        if release.sets:
            return release.manifests(self._tier(release.sets))
        build = release.builds.get(board_kind())
        return () if build is None else (build,)

    def _why_none(self, release: "Release") -> str:
        from fleet_protocol.identity.release import board_kind  # noqa: PLC0415  (as in receive)

        if release.sets:
            return f"tiers {', '.join(release.sets)} are beyond this board's limits"
        return f"it is for {', '.join(release.builds)}, and this board is {board_kind()}"

    def _decline(self, release: "Release", why: str) -> None:
        self.move("unfit", release.number, why, sets=bool(release.sets))

    def _tier(self, sets: Collection[str]) -> str:
        """Return the tier of this board's last task, or the largest within its limits, or None."""
        config = self._config
        last = str(read_index(config.state_dir).newest.get("tier", ""))
        able = [tier for tier in sets if within(tier, config.max_width, config.max_depth)]
        if last in able:
            return last
        return able[0] if able else ""

    def move(
        self,
        event: str,
        number: int | None = None,
        why: str = "",
        *,
        sets: bool = False,
    ) -> None:
        """Move as `TRANSITIONS` defines, first on disk.

        Args:
            event: event that has happened.
            number: number of the release that becomes the current one.
            why: one line for the operator.
            sets: whether the record is that of artifact sets instead of runtimes.

        Raises:
            StorageError: the record cannot be written; everything except `wanted` is unchanged.
        """
        self.wanted = None
        path = self._sets_path if sets else self._path
        line = (self.sets if sets else self.record) or "running 0 0"
        phase, current, before = line.split(" ")[:3]
        if number is not None and phase == "running":
            before = current  # the release that runs now is the one to return to
        reason = " ".join(why.split())[:1000]
        next_phase = TRANSITIONS[phase, event]
        record = f"{next_phase} {number or current} {before} 0 {reason}".strip()
        if path is not None:
            write_atomically(path, f"{record}\n".encode())
        if sets:
            self.sets = record
            return
        self.record = record
        self.trial_ends_at = math.inf
        self.restarts = event in {"whole", "silent"}


def on_trial() -> bool:
    """Return whether this process runs a release that has not reached a server yet."""
    folder = os.environ.get("SHOAL_RELEASES")
    return bool(folder) and _is_trial(_read(Path(str(folder), "record")))


def _is_trial(record: str | None) -> bool:
    return (record or "").startswith("trial ")


def _number_of(record: str) -> int:
    return int(record.split(" ")[1])


def _read(path: Path | None) -> str | None:
    """Read a record; `INITIAL_RECORD` if it is missing or damaged.

    None if there can be none.
    """
    if path is None:
        return None
    with contextlib.suppress(OSError):
        record = path.read_text(encoding="utf-8", errors="replace").strip()
        if re.match(RELEASE_PATTERN, record):
            return record
    return INITIAL_RECORD
