"""Finds out whether a fleet has another server, whose retained status names its store."""

import re
import secrets
import socket
from pathlib import Path

from pydantic import ValidationError

from fleet_protocol.blob_store import write_atomically
from fleet_protocol.errors import BlobError
from fleet_protocol.foreign_files import read_regular
from fleet_protocol.locks import LOCKS, is_held
from fleet_protocol.messages import ServerStatus

_NUMBER = "server-number"
_NUMBER_BYTES = 8


def read_store_number(folder: Path) -> str:
    """Return the number of the store in a folder; empty if it has none yet.

    In a store that somebody else packed, anything may lie in place of the file: it counts as none,
    and a new number is drawn.
    """
    try:
        number = read_regular(folder / _NUMBER, 2 * _NUMBER_BYTES).decode("ascii", "replace")
    except BlobError:
        return ""
    return number if re.fullmatch(f"[0-9a-f]{{{2 * _NUMBER_BYTES}}}", number) else ""


def describe_store(folder: Path) -> str:
    """Return a server's description of its store: its number, the folder and the computer.

    The number is drawn at the first call.
    """
    # Written before it is used, so that a restart has the same number.
    if not read_store_number(folder):
        write_atomically(folder / _NUMBER, secrets.token_hex(_NUMBER_BYTES).encode())
    return f"{read_store_number(folder)}, {folder.resolve()} on {socket.gethostname()}"[:200]


def place_of(status: ServerStatus) -> str:
    """Return the folder and the computer of the store that a server has."""
    # The description has the number before the first comma.
    _number, _, place = status.store.partition(", ")
    return place or "unknown"


def is_other_server(status: ServerStatus | None, folder: Path) -> bool:
    """Return whether a status belongs to another running server.

    A broker that was killed together with its server keeps the status. Whether the server of a
    store elsewhere is running cannot be known here; a store on this computer is locked by its
    server. A store with the same number in another folder is the original of a copy, or has been
    moved.

    Args:
        status: the retained status of the fleet's server, if any.
        folder: folder of this server's store.
    """
    if status is None or not status.online:
        return False
    number, _, place = status.store.partition(", ")
    # Without locks, or with another number, the status cannot be this store's.
    if not LOCKS or not read_store_number(folder) or number != read_store_number(folder):
        return True
    path, _, computer = place.rpartition(" on ")
    folders = {folder}
    if computer == socket.gethostname() and Path(path).is_dir():
        folders.add(Path(path))
    # A store that nobody has locked has no server.
    return any(is_held(store) for store in folders)


def other_store(payload: bytes, name: str) -> str | None:
    """Return the store of another server that reports to be online.

    Args:
        payload: a status as received.
        name: name of this server's store, see `describe_store`.

    Returns:
        None if it is this server's; empty if the status is a server's farewell.
    """
    try:
        # Anything else on this topic is not a status, and says nothing.
        status = ServerStatus.model_validate_json(payload)
    except ValidationError:
        return None
    if not status.online:
        return ""
    return None if status.store == name else status.store
