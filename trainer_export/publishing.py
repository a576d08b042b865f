"""Publishes artifact sets: a folder takes the place of another in one rename.

Its files lie by content beside it.

What is unfinished lies in a hidden folder, which is locked while its export lives: the export that
ends takes it away, however it ends, and what a killed one left is taken away by the next.
"""

import contextlib
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from fleet_protocol.errors import StorageError
from fleet_protocol.locks import LOCKS, hold
from fleet_protocol.manifest import digest_of

_OBJECTS = "objects"
_TRIES = 10  # of making a folder that an export beside this one takes for a dead one's and removes


def write_file(path: Path, data: bytes) -> None:
    """Write a file below the folder of :func:`replacing`, of a set that is not published yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Make a folder that takes the place of ``folder`` if the block ends well, and vanishes if not.

    SIGTERM ends the block as SIGINT does. When it is published each file is a link to
    ``objects/<sha256[:2]>/<sha256>`` beside the folder, and objects that no set has any more are
    gone.

    Raises:
        StorageError: no folder can be made beside it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    retired = folder.with_name(f".{folder.name}.old")
    if retired.exists() and not folder.exists():
        # A process was killed between the two renames below.
        retired.rename(folder)
    with _interruptible(), _locked_folder(folder) as fresh:
        shutil.rmtree(retired, ignore_errors=True)
        try:
            fresh.chmod(0o755)
            yield fresh
            _link_objects(fresh, folder.parent / _OBJECTS)
            _replace(folder, fresh, retired)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
            shutil.rmtree(retired, ignore_errors=True)
            _forget_objects(folder.parent / _OBJECTS)


def _replace(folder: Path, fresh: Path, retired: Path) -> None:
    """Put a folder in the place of another; if that fails, the other is back."""
    try:
        if folder.exists():
            folder.rename(retired)
        fresh.rename(folder)
    except BaseException:
        if retired.exists() and not folder.exists():
            retired.rename(folder)
        raise


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM raise, so that what is unfinished is removed.

    A program that handles it itself goes on doing so.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def _locked_folder(folder: Path) -> Iterator[Path]:
    """Make a hidden folder beside another, locked until the end.

    Those whose export ended are removed.
    """
    prefix = f".{folder.name}.new-"
    if LOCKS:  # without them there is no way to know whether an export still holds a folder
        _remove_unheld(folder.parent, prefix)
    with contextlib.ExitStack() as stack:
        for _ in range(_TRIES):
            fresh = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
            with contextlib.suppress(OSError):
                if LOCKS:
                    stack.callback(os.close, hold(fresh))
                if fresh.exists():
                    break
        else:
            raise StorageError(
                f"no folder can be kept beside {folder} while it is exported; export into another"
                " folder"
            )
        yield fresh


def _remove_unheld(parent: Path, prefix: str) -> None:
    """Remove the hidden folders that no process holds."""
    for abandoned in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            lock = hold(abandoned)
            shutil.rmtree(abandoned, ignore_errors=True)
            os.close(lock)


def _link_objects(folder: Path, objects: Path) -> None:
    """Make every file of a folder a link to the object of its content."""
    files = []
    for path in folder.rglob("*"):
        if path.is_file():
            files.append(path)
    for path in files:
        digest = digest_of(path.read_bytes())
        stored = objects / digest[:2] / digest
        stored.parent.mkdir(parents=True, exist_ok=True)
        link = path.with_name(f"{path.name}.link")
        try:
            if not stored.exists():
                os.link(path, stored)
            elif not stored.samefile(path):
                os.link(stored, link)
                link.replace(path)
        except OSError:  # a file system without hard links
            shutil.copyfile(path, stored)


def _forget_objects(objects: Path) -> None:
    """Remove objects that no set links to.

    They are of sets that were replaced, and of exports that were killed.
    """
    for stored in objects.glob("??/*"):
        with contextlib.suppress(OSError):
            if stored.stat().st_nlink == 1:
                stored.unlink()
    for folder in (*objects.glob("??"), objects):
        with contextlib.suppress(OSError):
            folder.rmdir()  # if it is empty
