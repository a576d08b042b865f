"""Recognises repeated messages by counters, which grow within a session and with every session."""

import contextlib
import json
import os
import time
from pathlib import Path
from shlex import quote
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from fleet_protocol.errors import RefusalReason, RefusedError, StorageError
from fleet_protocol.identity.certificate import Certificate
from fleet_protocol.identity.enrolment import write_secret

_SESSION_BITS = 32
_SERVER_KEY = "server"  # no key of a signer, which has a topic behind it

SavedT = TypeVar("SavedT", dict[str, int], dict[str, str])


def read_saved(path: Path | None, kind: type[SavedT]) -> SavedT:
    """Read values by name from a JSON file; nothing if there is no path or no valid file."""
    if path is None:
        return kind()
    # At the first start there is no file, and after a power cut it may be broken.
    with contextlib.suppress(OSError, ValidationError):
        return TypeAdapter(kind).validate_json(path.read_bytes())
    return kind()


def next_session(path: Path) -> int:
    """Return the number of a new session, which is larger than all earlier ones.

    It comes from the clock if that runs, else from the file. It is saved before anybody sees it:
    otherwise a board whose clock goes back at a power cut would not be believed again. If the disk
    is full, the clock alone decides, so that the board can still report that.
    """
    previous = read_saved(path, dict[str, int]).get("session", 0)
    session: int = max(int(time.time()), previous + 1) % 2**_SESSION_BITS
    with contextlib.suppress(StorageError):
        write_secret(path, json.dumps({"session": session}), durable=True)
    # The name of a new file must survive a power cut, too; Windows cannot open a folder.
    with contextlib.suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    return session


class ReplayGuard:
    """The highest counter of every signer on every topic.

    Args:
        path: file in which the counters survive a restart; None if they need not.
        patient: whether to keep a counter only in memory if the file cannot be written, so that a
            board can report why; else the message counts as not received.
    """

    def __init__(self, path: Path | None = None, *, patient: bool = False) -> None:
        self._path = path
        self._patient = patient
        self._highest = read_saved(path, dict[str, int])

    def record_message(
        self,
        signer: Certificate,
        topic: str,
        counter: int,
        *,
        farewell: bool,
        retained: bool,
    ) -> None:
        """Record the counter of a message.

        Args:
            signer: its sender.
            topic: where it arrived.
            counter: session in the upper 32 bits, number in the session in the lower.
            farewell: whether it is the session's last message, which was signed first.
            retained: whether the broker had kept it, so that it may be the newest one again.

        Raises:
            RefusedError: it was received before, or is older than one that was.
        """
        key = f"{signer.key} {topic}"
        highest = self._highest.get(key, -1)
        if farewell:
            if counter >> _SESSION_BITS < highest >> _SESSION_BITS:
                raise RefusedError(RefusalReason.REPLAYED, f"an old farewell of {signer.name}")
            return
        if counter < highest or (counter == highest and not retained):
            raise RefusedError(
                RefusalReason.REPLAYED,
                f"a message of {signer.name} on {topic} that was heard before, or its enrolment "
                f"is on two boards: `shoal enroll {quote(signer.name)}` ends both",
            )
        self._save(key, counter)

    def record_server(self, signer: Certificate) -> None:
        """Record the certificate of a server.

        Raises:
            RefusedError: a newer one is known.
        """
        highest = self._highest.get(_SERVER_KEY, -1)
        if signer.serial < highest:
            raise RefusedError(
                RefusalReason.REVOKED,
                f"a message with the server's key {signer.serial}, now {highest}",
            )
        if signer.serial > highest:
            self._save(_SERVER_KEY, signer.serial)

    def _save(self, key: str, value: int) -> None:
        self._highest[key] = value
        if self._path is None:
            return
        try:
            write_secret(self._path, json.dumps(self._highest))
        except StorageError:
            if not self._patient:
                raise
