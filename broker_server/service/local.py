"""The socket in the folder of a store at which local commands ask its server: where it is, and who is at its end.

Both sides write JSON documents, one a line. Only the owner of the store gets in: the socket's file is his alone (0600),
and each side asks the system for the user at the other end, where the system tells.
"""

import contextlib
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from fleet_protocol.errors import ConfigError, TransportError
from fleet_protocol.messages import MESSAGE_LIMIT_BYTES

SOCKET = "control.sock"
LINE_LIMIT_BYTES = MESSAGE_LIMIT_BYTES  # as of a request over MQTT
SUPPORTED = hasattr(socket, "AF_UNIX")
_AGAIN_SECONDS = 0.05  # between attempts to connect to a server that is busy
_LONGEST_PATH = 100  # bytes; systems take 104 or 108
_DESCRIPTORS = Path("/proc/self/fd")
_CREDENTIALS = struct.Struct("3i")  # process, user, group


@contextlib.contextmanager
def address_of(folder: Path) -> Iterator[str]:
    """An address of the socket in a folder that is short enough for the system, while the block lasts.

    Raises:
        OSError: the folder is not there, or its path is too long for this system.
    """
    path = str(folder / SOCKET)
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield path
        return
    if not _DESCRIPTORS.is_dir():
        raise OSError(f"the path of {path} is too long for a socket; give the store a shorter one")
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield f"{_DESCRIPTORS}/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)


def user_at(connection: socket.socket) -> int | None:
    """The user of the process at the other end; None where the system does not tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1])


def may_ask(user: int | None) -> bool:
    """Whether a server takes the word of a user: its own, and root, who could take it anyway."""
    return user is None or user in {os.geteuid(), 0}


def reach_server(folder: Path, seconds: float) -> socket.socket | None:
    """A connection to the server that works on a store; None where none listens there.

    Args:
        folder: of the store.
        seconds: how long a server that has many clients is asked again; later, how long it may take for each step.

    Raises:
        ConfigError: the server is another user's.
        TransportError: the server takes no further client.
    """
    if not SUPPORTED:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(seconds)
        with address_of(folder) as address:
            _connect(connection, address, time.monotonic() + seconds)
        user = user_at(connection)
    except PermissionError as error:
        connection.close()
        raise ConfigError(f"the server of the store {folder} is another user's: {_as_owner(folder)}") from error
    except BlockingIOError as error:
        connection.close()
        raise TransportError(
            f"the server of the store {folder} is busy with other commands, and took no further one within "
            f"{seconds:g} s; end commands that wait for it, or try again"
        ) from error
    except OSError:  # nobody listens: no socket, one that a killed server left, or no folder
        connection.close()
        return None
    if not (may_ask(user) or os.geteuid() == 0):
        connection.close()
        raise ConfigError(f"the socket in {folder} is one of user {user}, who is not you: {_as_owner(folder)}")
    return connection


def _connect(connection: socket.socket, address: str, give_up: float) -> None:
    """Connect to a socket; where as many wait there as the system lets wait, again until a ``time.monotonic()``.

    Raises:
        BlockingIOError: as many still wait.
        OSError: nobody listens, or another reason of the system's.
    """
    patience = threading.Event()  # the system tells nobody when there is room
    while True:
        try:
            connection.connect(address)
        except BlockingIOError:
            if time.monotonic() >= give_up:
                raise
            patience.wait(_AGAIN_SECONDS)
        else:
            return


def _as_owner(folder: Path) -> str:
    with contextlib.suppress(OSError):
        return f"run this command as user {folder.stat().st_uid}, who owns it"
    return "run this command as the user who owns it"


def remove_stale(folder: Path) -> None:
    """Remove the socket that a killed server left; whoever calls this has locked the store.

    Raises:
        OSError: something else is there, or it cannot be removed.
    """
    path = folder / SOCKET
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(f"{path} is no socket; remove it")
        path.unlink()
