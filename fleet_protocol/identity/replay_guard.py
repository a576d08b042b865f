"""Recognises repeated messages by counters, which grow within a session and with every session."""

import contextlib
import json
import os
import time
from pathlib import Path
from shlex import quote
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from fleet_protocol.errors import ConfigError, RefusalReason, RefusedError, StorageError
from fleet_protocol.identity.certificate import Certificate
from fleet_protocol.identity.counter_file import CounterFile
from fleet_protocol.identity.enrolment import write_secret

_SESSION_BITS = 32
_SLOW_FROM = 3 * 2**30  # in 2072; from then on each session number covers 16 seconds
_SLOW_SECONDS = 16
_SERVER_KEY = "server"  # not the key of a signer, which is followed by a topic

SavedT = TypeVar("SavedT", dict[str, int], dict[str, str])


def read_saved(path: Path | None, kind: type[SavedT]) -> SavedT:
    """Read values by name from a JSON file; nothing if there is no path or no valid file."""
    if path is None:
        return kind()
    # At the first start there is no file, and after a power cut it may be damaged.
    with contextlib.suppress(OSError, ValidationError):
        return TypeAdapter(kind).validate_json(path.read_bytes())
    return kind()


def next_session(path: Path) -> int:
    """Return the number of a new session, which is larger than all earlier ones.

    It comes from the clock if that is set, else from the file. It is saved before it is used:
    otherwise other members would no longer accept a board whose clock goes back at a power cut. If
    the disk is full, only the clock decides, so that the board can still report that.
    """
    previous = read_saved(path, dict[str, int]).get("session", 0)
    session: int = max(_session_at(time.time()), previous + 1)
    # A counter must not start again, or old messages would verify again.
    if session >= 2**_SESSION_BITS:
        raise ConfigError(
            f"{path} records session {previous}, the last one that its member can have; "
            "enrol the member again and remove this file"
        )
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


def _session_at(seconds: float) -> int:
    """Return the number of a session that begins now, by the clock.

    It has 32 bits, which seconds since 1970 would fill in 2106. The numbers grow more slowly from
    2072 on, and so last until 2616. A clock that shows a later date is wrong, and is treated as one
    that has stopped.
    """
    number = int(seconds)
    if number > _SLOW_FROM:
        number = _SLOW_FROM + (number - _SLOW_FROM) // _SLOW_SECONDS
    return number if number < 2**_SESSION_BITS else 0


class ReplayGuard:
    """The highest counter of every signer on every topic.

    Args:
        path: file in which the counters survive a restart; None if they need not.
        patient: whether to keep a counter only in memory if the file cannot be written, so that a
            board can report the reason; otherwise the message counts as not received.
        counter_file: the same for a server, which receives too many messages to write all counters
            for each.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        patient: bool = False,
        counter_file: CounterFile | None = None,
    ) -> None:
        self._path = path
        self._patient = patient
        self._counter_file = counter_file
        self._highest = read_saved(path, dict[str, int])
        if counter_file is not None:
            self._highest.update(counter_file.read())

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
            topic: topic on which it arrived.
            counter: session in the upper 32 bits, number in the session in the lower.
            farewell: whether it is the session's last message, which was signed first.
            retained: whether the broker had stored it, so that it may be the newest one again.

        Raises:
            RefusedError: it was received before, or is older than one that was.
        """
        # By signer and topic, because the broker keeps the order of one topic only.
        key = f"{signer.key} {topic}"
        highest = self._highest.get(key, -1)
        if farewell:
            # It was signed at the start of its session, so its counter may be lower than that of
            # later messages.
            if counter >> _SESSION_BITS < highest >> _SESSION_BITS:
                raise RefusedError(RefusalReason.REPLAYED, f"an old farewell of {signer.name}")
            return
        # The broker delivers a retained message again with every subscription.
        if counter < highest or (counter == highest and not retained):
            raise RefusedError(
                RefusalReason.REPLAYED,
                f"a message of {signer.name} on {topic} that was received before, or two "
                f"boards use its enrolment: `shoal enroll {quote(signer.name)}` ends both",
            )
        if counter == highest:
            return
        self._save(key, counter)
        if self._counter_file is not None:
            self._counter_file.save(key, self._highest)

    def record_server(self, signer: Certificate) -> None:
        """Record the certificate of a server.

        Raises:
            RefusedError: a newer one is known.
        """
        highest = self._highest.get(_SERVER_KEY, -1)
        if signer.serial < highest:
            raise RefusedError(
                RefusalReason.REVOKED,
                f"a message with the server's key {signer.serial}, but the current key is "
                f"{highest}",
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
