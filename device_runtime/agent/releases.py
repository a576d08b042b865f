"""The runtimes of a board side by side, and its artifact sets: which one runs, which one is tried,
and the way back.

What starts the agent (`launch`, which a bundle brings and no release replaces) reads the same
record, one line of PHASE NUMBER BEFORE STARTS WHY, and moves it, too: a runtime that does not start
cannot. To rename that file is the switch.

Of artifact sets the record says which have passed here; the server names them in tasks, and others
again.
"""

import contextlib
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
MADE = "running 0 0 0"  # the record of a board as it was made
_TRIES = 10  # of the broker, in whose time a server must have heard a release

# fmt: off
TRANSITIONS: Mapping[tuple[str, str], str] = MappingProxyType({
    # from      what        to           by whom
    ("running", "whole"):  "fetched",  # the agent that runs has the file, verified, as WHY; it ends
    ("failed",  "whole"):  "fetched",
    ("running", "unfit"):  "failed",   # it does not take it; BEFORE runs on, and WHY is told
    ("failed",  "unfit"):  "failed",
    ("running", "passed"): "running",  # artifact sets are here, and have passed their self-test
    ("failed",  "passed"): "running",
    ("fetched", "tested"): "trial",    # the launcher has unpacked it, and its self-test has passed
    ("fetched", "broken"): "failed",   # it has not, or took the board down three times; BEFORE runs
    ("trial",   "heard"):  "running",  # the agent on trial: the server has heard it
    # it has not in time, and the agent ends; or it ended by itself three times
    ("trial",   "silent"): "failed",
    # On trial and fetched nothing newer is taken: there is one way back.
})
# fmt: on


class Releases:
    """The record, and what is to be fetched.

    Without a launcher, which says where the record is, nothing.

    Attributes:
        record: the line as it is on disk, None without a launcher.
        sets: the same of artifact sets, None where there is no operator who signs them.
        wanted: what is to be fetched, signed by the operator, and its file for this board, of sets
            the manifest.
        until: ``time.monotonic()`` when a trial ends.
        over: whether the agent ends for another runtime to start.
    """

    def __init__(self, config: DeviceConfig) -> None:
        folder = os.environ.get("SHOAL_RELEASES")
        self._config = config
        self.over = False
        self._path = Path(folder) / "record" if folder else None
        self._sets_path = config.state_dir / "sets-record" if config.identity else None
        self.record = _read(self._path)
        self.sets = _read(self._sets_path)
        self.wanted: tuple[Release, BlobRef] | None = None
        trial = (self.record or "").startswith("trial ")
        self.until = (
            time.monotonic() + _TRIES * config.connect_timeout_seconds if trial else float("inf")
        )

    def hear(self, told: OperatorNotice) -> None:
        """Take what is said of releases.

        Raises:
            RefusedError: this one is older than one that the board has had in hand.
            StorageError: the record cannot be written.
        """
        from fleet_protocol.identity.release import Release, board_kind  # noqa: PLC0415  (cryptography: a board's memory)

        new = told.release if isinstance(told.release, Release) else None
        self.wanted = None
        if (self.record or "").startswith("trial "):
            if told.heard == int(str(self.record).split(" ")[1]):
                self.move("heard")
            return
        record = self.record if new is None or not new.sets else self.sets
        if record is None or new is None:
            return
        known = int(record.split(" ")[1])
        sets = bool(new.sets)
        if new.number < known:
            raise RefusedError(
                RefusalReason.REPLAYED, f"release {new.number}, where {known} is known"
            )
        if new.number > known:
            ref = new.sets.get(self._tier(new.sets)) if sets else new.builds.get(board_kind())
            if ref is None and sets:
                self.move(
                    "unfit",
                    new.number,
                    f"tiers {', '.join(new.sets)} are beyond this board's limits",
                    sets=sets,
                )
            elif ref is None:
                self.move(
                    "unfit",
                    new.number,
                    f"it is for {', '.join(new.builds)}, and this board is {board_kind()}",
                )
            elif 0 < new.expires < time.time():
                why = "it has expired; the operator signs it again with a new rollout"
                self.move("unfit", new.number, why, sets=sets)
            elif ref.size > self._config.max_cache_bytes:
                self.move(
                    "unfit",
                    new.number,
                    f"its {ref.size} bytes are more than max_cache_bytes",
                    sets=sets,
                )
            else:
                self.wanted = (new, ref)

    def _tier(self, sets: Collection[str]) -> str:
        """The tier of which this board had its last task, or the largest within its limits, or
        none.
        """
        last = str(read_index(self._config.state_dir).newest.get("tier", ""))
        config = self._config
        able = [tier for tier in sets if within(tier, config.max_width, config.max_depth)]
        return last if last in able else next(iter(able), "")

    def move(
        self,
        event: str,
        number: int | None = None,
        why: str = "",
        *,
        sets: bool = False,
    ) -> None:
        """Go where `TRANSITIONS` says, on disk first.

        A number is that of a release that is now the one in hand.

        The record is that of `sets`, or that of runtimes.

        Raises:
            StorageError: the record cannot be written; all is as before.
        """
        path, line = (self._sets_path, self.sets) if sets else (self._path, self.record)
        self.wanted, (phase, old, before) = None, (line or "running 0 0").split(" ")[:3]
        before = old if number is not None and phase == "running" else before
        record = f"{TRANSITIONS[phase, event]} {number or old} {before} 0 {' '.join(why.split())[:1000]}".strip()
        if path is not None:
            write_atomically(path, f"{record}\n".encode())
        if sets:
            self.sets = record
        else:
            self.record, self.until, self.over = (
                record,
                float("inf"),
                event in {"whole", "silent"},
            )


def on_trial() -> bool:
    """Whether this process runs a release that no server has heard yet."""
    folder = os.environ.get("SHOAL_RELEASES")
    return bool(folder) and (_read(Path(str(folder), "record")) or "").startswith("trial ")


def _read(path: Path | None) -> str | None:
    """The record in a file, `MADE` where there is none or it is damaged.

    None where there can be none.
    """
    if path is None:
        return None
    with contextlib.suppress(OSError):
        found = path.read_text(encoding="utf-8", errors="replace").strip()
        return found if re.match(RELEASE_PATTERN, found) else MADE
    return MADE
