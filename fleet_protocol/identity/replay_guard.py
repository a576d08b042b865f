"""What has been heard last from whom, and how often this member has started: what makes a
repetition one.
"""

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


SavedT = TypeVar("SavedT", dict[str, int], dict[str, str])


def read_saved(path: Path | None, kind: type[SavedT]) -> SavedT:
    """What a file keeps of names in JSON; nothing where there is no file."""
    with contextlib.suppress(
        OSError, ValidationError
    ):  # the first start, or a power cut; what is unknown is new
        return TypeAdapter(kind).validate_json(path.read_bytes() if path is not None else "{}")
    return kind()


def next_session(path: Path) -> int:
    """A number larger than any before: by the clock where it runs, by the file that keeps it where
    it does not.

    It is kept before anybody hears it: a board whose clock goes back at a power cut would not be
    believed again. Where the disk is full it goes by the clock alone, or the board could not say
    so.
    """
    session: int = (
        max(int(time.time()), read_saved(path, dict[str, int]).get("session", 0) + 1)
        % 2**_SESSION_BITS
    )
    with contextlib.suppress(StorageError):
        write_secret(path, json.dumps({"session": session}), durable=True)
    with contextlib.suppress(OSError):  # its name, too; Windows has no such thing
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    return session


class ReplayGuard:
    """The highest counter of every signer on every topic; a path is where they survive a restart.

    Where they cannot be kept, nothing was heard; but a board that is `patient` keeps them in memory
    then, to say why.
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
        """Note a message by its signer, topic and counter.

        One that is retained may be the one that was heard last.

        A farewell was signed when the session began, so it counts as the session's last.

        Raises:
            RefusedError: it was said before.
        """
        key = f"{signer.key} {topic}"
        known = self._highest.get(key, -1)
        if farewell:
            if counter >> _SESSION_BITS < known >> _SESSION_BITS:
                raise RefusedError(RefusalReason.REPLAYED, f"an old farewell of {signer.name}")
            return
        if counter < known or (counter == known and not retained):
            text = f"a message of {signer.name} on {topic} that was heard before, or its enrolment is on two boards"
            raise RefusedError(
                RefusalReason.REPLAYED,
                f"{text}: `shoal enroll {quote(signer.name)}` ends both",
            )
        self._keep(key, counter)

    def record_server(self, signer: Certificate) -> None:
        """Note the certificate of a server; a RefusedError where a newer one was seen."""
        known = self._highest.get("server", -1)
        if signer.serial < known:
            raise RefusedError(
                RefusalReason.REVOKED,
                f"a message with the server's key {signer.serial}, now {known}",
            )
        if signer.serial > known:
            self._keep("server", signer.serial)

    def _keep(self, key: str, value: int) -> None:
        self._highest[key] = value
        if self._path is not None:
            with contextlib.suppress(*[StorageError] * self._patient):
                write_secret(self._path, json.dumps(self._highest))
