"""Whether a fleet has another server: which store each of them has, as their retained statuses say."""

import contextlib
import os
import secrets
import socket
from pathlib import Path

from pydantic import ValidationError

from fleet_protocol.blob_store import write_atomically
from fleet_protocol.locks import LOCKS, hold
from fleet_protocol.messages import ServerStatus

_NUMBER = "server-number"


def number_of(folder: Path) -> str:
    """The number of the store in a folder; empty where there is none yet."""
    with contextlib.suppress(OSError):
        return (folder / _NUMBER).read_text(encoding="ascii")
    return ""


def name_of(folder: Path) -> str:
    """What the server of a store says of it: its number, which is made if need be, the folder, and
    the computer.
    """
    if not number_of(folder):
        write_atomically(folder / _NUMBER, secrets.token_hex(8).encode())
    return f"{number_of(folder)}, {folder.resolve()} on {socket.gethostname()}"[:200]


def another(status: ServerStatus | None, folder: Path) -> bool:
    """Whether a status is that of a server that is up: not what a broker has kept of one that was
    killed with it.

    Of a store elsewhere nobody here can tell; one that is here is locked by its server. One that
    has the number of this one in another folder is what this is a copy of, or it was moved.
    """
    if status is None or not status.online:
        return False
    number, _, place = status.store.partition(", ")
    if not LOCKS or not number_of(folder) or number != number_of(folder):
        return True
    there, _, computer = place.rpartition(" on ")
    of_here = (
        {folder, Path(there)}
        if computer == socket.gethostname() and Path(there).is_dir()
        else {folder}
    )
    try:
        for path in of_here:
            os.close(hold(path))
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def rival(payload: bytes, name: str) -> str | None:
    """The store of another server that says it is there, by what the server of a store has named
    so.

    None if it is this one, empty where one says that it has gone.
    """
    with contextlib.suppress(ValidationError):
        status = ServerStatus.model_validate_json(payload)
        return "" if not status.online else status.store if status.store != name else None
    return None
