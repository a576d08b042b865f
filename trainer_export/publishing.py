"""Publishes artifact sets: one rename replaces a folder by another.

Its files are stored by content beside it.

An unfinished set is in a hidden folder, locked while its export runs. The export removes the folder
when it ends for any reason; the next export removes the folder of a killed one.
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
_TRIES = 10  # a parallel export may remove a new folder that it takes for an abandoned one


def write_file(path: Path, data: bytes) -> None:
    """Write a file below the folder of :func:`replacing`, of a set that is not published yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Create a folder that replaces ``folder`` if the block succeeds, and is removed otherwise.

    SIGTERM ends the block like SIGINT. Each published file is a link to
    ``objects/<sha256[:2]>/<sha256>`` beside the folder, and objects that no set uses any longer are
    removed.

    Raises:
        StorageError: cannot create a folder beside it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    retired = folder.with_name(f".{folder.name}.old")
    if retired.exists() and not folder.exists():
        # An earlier process was killed between the two renames below.
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
    """Replace a folder by another; restore it if that fails."""
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
    """Let SIGTERM raise an exception, so that the unfinished folder is removed.

    An existing handler of the program stays in place.
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
    """Create a hidden folder beside another, locked until the end.

    Hidden folders of ended exports are removed.
    """
    prefix = f".{folder.name}.new-"
    if LOCKS:  # without locks it is impossible to detect whether an export still uses a folder
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
                f"parallel exports kept removing the temporary folder beside {folder}; export"
                " into another folder"
            )
        yield fresh


def _remove_unheld(parent: Path, prefix: str) -> None:
    """Remove the hidden folders that no process has locked."""
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

    They belong to replaced sets and to killed exports.
    """
    for stored in objects.glob("??/*"):
        with contextlib.suppress(OSError):
            if stored.stat().st_nlink == 1:
                stored.unlink()
    for folder in (*objects.glob("??"), objects):
        with contextlib.suppress(OSError):
            folder.rmdir()  # if it is empty
