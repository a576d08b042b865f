"""Finds out whether a fleet has another server: their retained statuses name their stores."""

import contextlib
import secrets
import socket
from pathlib import Path

from pydantic import ValidationError

from fleet_protocol.blob_store import write_atomically
from fleet_protocol.locks import LOCKS, is_held
from fleet_protocol.messages import ServerStatus

_NUMBER = "server-number"


def read_store_number(folder: Path) -> str:
    """Return the number of the store in a folder; empty where there is none yet."""
    with contextlib.suppress(OSError):
        return (folder / _NUMBER).read_text(encoding="ascii")
    return ""


def describe_store(folder: Path) -> str:
    """Return what the server of a store says of it: its number, the folder and the computer.

    The number is drawn when it is first asked for.
    """
    if not read_store_number(folder):
        write_atomically(folder / _NUMBER, secrets.token_hex(8).encode())
    return f"{read_store_number(folder)}, {folder.resolve()} on {socket.gethostname()}"[:200]


def is_other_server(status: ServerStatus | None, folder: Path) -> bool:
    """Return whether a status is that of another server that is up.

    A broker that was killed with its server keeps the status. Whether the server of a store
    elsewhere is up cannot be known here; a store on this computer is locked by its server. A store
    with the same number in another folder is the original of a copy, or was moved.

    Args:
        status: the retained status of the fleet's server, if any.
        folder: of this server's store.
    """
    if status is None or not status.online:
        return False
    number, _, place = status.store.partition(", ")
    if not LOCKS or not read_store_number(folder) or number != read_store_number(folder):
        return True
    path, _, computer = place.rpartition(" on ")
    folders = {folder}
    if computer == socket.gethostname() and Path(path).is_dir():
        folders.add(Path(path))
    # A store that nobody has locked has no server.
    return any(is_held(store) for store in folders)


def other_store(payload: bytes, name: str) -> str | None:
    """Return the store of another server that says it is there.

    Args:
        payload: a status as it travelled.
        name: of this server's store, see `describe_store`.

    Returns:
        None if it is this server's; empty if a server says that it has gone.
    """
    try:
        status = ServerStatus.model_validate_json(payload)
    except ValidationError:
        return None
    if not status.online:
        return ""
    return None if status.store == name else status.store
