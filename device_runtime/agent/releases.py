"""The runtimes of a board side by side: which one runs, which one is tried, and the way back.

What starts the agent (`launch`, which a bundle brings and no release replaces) reads the same record, one line of PHASE
NUMBER BEFORE STARTS WHY, and moves it, too: a runtime that does not start cannot. To rename that file is the switch.
"""

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from device_runtime.settings import DeviceConfig
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.messages.values import RELEASE_PATTERN, BlobRef
from fleet_protocol.transport import Told

if TYPE_CHECKING:
    from fleet_protocol.identity.release import Release

RESTART = 75  # exit code of an agent that ends for another runtime to start (EX_TEMPFAIL)
_TRIES = 10  # of the broker, in whose time a server must have heard a release

# fmt: off
TRANSITIONS: Mapping[tuple[str, str], str] = MappingProxyType({
    # from      what        to           by whom
    ("running", "whole"):  "fetched",  # the agent that runs has the file, verified, as WHY; it ends
    ("failed",  "whole"):  "fetched",
    ("running", "unfit"):  "failed",   # it does not take it; BEFORE runs on, and WHY is told
    ("failed",  "unfit"):  "failed",
    ("fetched", "tested"): "trial",    # the launcher has unpacked it, and its self-test has passed
    ("fetched", "broken"): "failed",   # it has not, or took the board down three times; BEFORE runs
    ("trial",   "heard"):  "running",  # the agent on trial: the server has heard it
    ("trial",   "silent"): "failed",   # it has not in time, and the agent ends; or it ended by itself three times
    # On trial and fetched nothing newer is taken: there is one way back.
})
# fmt: on


class Releases:
    """The record, and what is to be fetched; without a launcher, which says where the record is, nothing.

    Attributes:
        record: the line as it is on disk, None without a launcher.
        wanted: what is to be fetched, signed by the operator, and its file for this board.
        until: ``time.monotonic()`` when a trial ends.
        over: whether the agent ends for another runtime to start.
    """

    def __init__(self, config: DeviceConfig) -> None:
        folder = os.environ.get("SHOAL_RELEASES")
        self._path = Path(folder) / "record" if folder else None
        self.record = None if self._path is None else "running 0 0 0"
        if self._path is not None and self._path.exists():
            found = self._path.read_text(encoding="utf-8", errors="replace").strip()
            self.record = found if re.match(RELEASE_PATTERN, found) else self.record
        self._most_bytes, self.over = config.max_cache_bytes, False
        self.wanted: tuple[Release, BlobRef] | None = None
        trial = (self.record or "").startswith("trial ")
        self.until = time.monotonic() + _TRIES * config.connect_timeout_seconds if trial else float("inf")

    def hear(self, told: Told) -> None:
        """Take what is said of releases.

        Raises:
            RefusedError: this one is older than one that the board has had in hand.
            StorageError: the record cannot be written.
        """
        from fleet_protocol.identity.release import Release, kind_of  # noqa: PLC0415  (cryptography: a board's memory)

        new, self.wanted = told.release if isinstance(told.release, Release) else None, None
        if self.record is None:
            return
        phase, number = self.record.split(" ")[:2]
        if phase == "trial":
            if told.heard == int(number):
                self.move("heard")
        elif new is not None and new.number < int(number):
            raise RefusedError(RefusalReason.REPLAYED, f"release {new.number}, where {number} is known")
        elif new is not None and new.number > int(number):
            ref = new.builds.get(kind_of())
            if ref is None:
                self.move("unfit", new.number, f"it is for {', '.join(new.builds)}, and this board is {kind_of()}")
            elif 0 < new.expires < time.time():
                self.move("unfit", new.number, "it has expired; the operator signs it again with a new rollout")
            elif ref.size > self._most_bytes:
                self.move("unfit", new.number, f"its {ref.size} bytes are more than max_cache_bytes")
            else:
                self.wanted = (new, ref)

    def move(self, event: str, number: int | None = None, why: str = "") -> None:
        """Go where `TRANSITIONS` says, on disk first; a number is that of a release that is now the one in hand.

        Raises:
            StorageError: the record cannot be written; all is as before.
        """
        self.wanted, (phase, old, before) = None, (self.record or "running 0 0").split(" ")[:3]
        before = old if number is not None and phase == "running" else before
        record = f"{TRANSITIONS[phase, event]} {number or old} {before} 0 {' '.join(why.split())[:1000]}".strip()
        if self._path is not None:
            write_atomically(self._path, f"{record}\n".encode())
        self.record, self.until, self.over = record, float("inf"), event in {"whole", "silent"}
