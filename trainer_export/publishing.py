"""Writes artifact sets: files by content, and a folder that replaces another in one rename."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fleet_protocol.manifest import digest_of

__all__ = ["replacing", "write_file"]


def write_file(path: Path, out: Path, data: bytes) -> None:
    """Store content once under its digest and link it to where people look for it.

    Args:
        path: where people look for it.
        out: folder of all artifact sets.
        data: the content.
    """
    digest = digest_of(data)
    stored = out / "objects" / digest[:2] / digest
    if not stored.exists():
        stored.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=stored.parent, delete=False) as temporary:
            temporary.write(data)
        Path(temporary.name).chmod(0o644)
        Path(temporary.name).replace(stored)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(stored, path)
    except OSError:
        shutil.copyfile(stored, path)  # a file system without hard links


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A new folder that takes the place of ``folder`` if the block ends well, and vanishes if not."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    retired = folder.with_name(f".{folder.name}.old")
    if retired.exists():  # a process was killed between the two renames below
        if folder.exists():
            shutil.rmtree(retired)
        else:
            retired.rename(folder)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.new-", dir=folder.parent))
    try:
        fresh.chmod(0o755)
        yield fresh
        if folder.exists():
            folder.rename(retired)
        try:
            fresh.rename(folder)
        except OSError:
            if retired.exists():
                retired.rename(folder)
            raise
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    shutil.rmtree(retired, ignore_errors=True)
