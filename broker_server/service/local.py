"""The socket in a store's folder, over which local commands reach its server.

Both sides write JSON documents, one per line. Only the owner of the store can connect: the socket's
file has mode 0600, and each side queries the system for the user at the other end, if the system
reports it.
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
LINE_LIMIT_BYTES = MESSAGE_LIMIT_BYTES  # as in a request over MQTT
SUPPORTED = hasattr(socket, "AF_UNIX")
_AGAIN_SECONDS = 0.05  # between attempts to connect to a server that is busy
_LONGEST_PATH = 100  # bytes; systems take 104 or 108
_DESCRIPTORS = Path("/proc/self/fd")
_CREDENTIALS = struct.Struct("3i")  # process, user, group


@contextlib.contextmanager
def address_of(folder: Path) -> Iterator[str]:
    """Yield an address of the socket in a folder that is short enough for the system.

    It is valid while the block lasts.

    Raises:
        OSError: the folder does not exist, or its path is too long for this system.
    """
    path = str(folder / SOCKET)
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield path
        return
    if not _DESCRIPTORS.is_dir():
        raise OSError(f"the path {path} is too long for a socket; move the store to a shorter path")
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield f"{_DESCRIPTORS}/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)


def user_at(connection: socket.socket) -> int | None:
    """Return the user of the process at the other end; None if the system does not report it."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1])


def may_ask(user: int | None) -> bool:
    """Return whether a server accepts a user: its own, and root, which has all rights anyway."""
    return user is None or user in {os.geteuid(), 0}


def reach_server(folder: Path, seconds: float) -> socket.socket | None:
    """Connect to the server that uses a store; return None if no server listens there.

    Args:
        folder: folder of the store.
        seconds: how long to retry while the server has too many clients; later, how long each step
            may take.

    Raises:
        ConfigError: the server belongs to another user.
        TransportError: the server accepts no further client.
    """
    # In a store that somebody has packed, a link may lead to the socket of another program.
    if not SUPPORTED or (folder / SOCKET).is_symlink():
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(seconds)
        with address_of(folder) as address:
            _connect(connection, address, time.monotonic() + seconds)
        user = user_at(connection)
    except PermissionError as error:
        connection.close()
        raise ConfigError(
            f"the server of the store {folder} belongs to another user: {_as_owner(folder)}"
        ) from error
    except BlockingIOError as error:
        connection.close()
        raise TransportError(
            f"the server of the store {folder} is busy with other commands, and did not accept"
            f" another one within {seconds:g} s; end commands that are waiting for it, or try"
            " again"
        ) from error
    except OSError:  # no socket, no folder, or nothing listens at the socket
        connection.close()
        return None
    if not (may_ask(user) or os.geteuid() == 0):
        connection.close()
        raise ConfigError(f"the socket in {folder} belongs to user {user}: {_as_owner(folder)}")
    return connection


def _connect(connection: socket.socket, address: str, give_up: float) -> None:
    """Connect to a socket; if its queue is full, try again until a ``time.monotonic()``.

    Raises:
        BlockingIOError: the queue is still full.
        OSError: no program is listening, or the system gives another reason.
    """
    patience = threading.Event()  # the system does not report when there is space
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
    """Remove a socket left by a killed server; the caller has locked the store.

    Raises:
        OSError: the file is not a socket, or it cannot be removed.
    """
    path = folder / SOCKET
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(f"{path} is not a socket; remove it")
        path.unlink()
