"""``make fuzz``: files that an operator receives, changed at random, and read as they are used.

    python -m tests.operator_fuzz [--count 1000000] [--seconds 3600] [--seed 1]

Artifact sets, backups, bundles, enrolments and configurations. A changed file is used, or refused
by an error of Shoal. Another error, a reading that hangs, a file outside of the folder that is
opened, a connection or a program that is started ends the run with the bytes that did it.
"""

import argparse
import contextlib
import faulthandler
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from fleet_protocol.errors import ShoalError
from tests.fuzz import mutated
from tests.operator_files import FileKind, RefusedByLauncherError, file_kinds

__all__ = ["GROUPS", "FileReadings", "Watch", "fuzz"]

GROUPS = ("sets", "backups", "bundles", "enrolments", "configurations")
HANG_SECONDS = 10.0  # of the processor; the slowest reading takes 0.1 s
_CANARY = "outside"

_STARTED = frozenset(
    {
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.startfile",
        "os.system",
        "pickle.find_class",
        "pty.spawn",
        "socket.bind",
        "socket.connect",
        "socket.getaddrinfo",
        "socket.gethostbyname",
        "sqlite3.load_extension",
        "subprocess.Popen",
    }
)
"""Audit events of programs, connections and code that no file may cause."""
_CHANGES = frozenset(
    {
        "os.chmod",
        "os.link",
        "os.mkdir",
        "os.remove",
        "os.rename",
        "os.rmdir",
        "os.symlink",
        "os.truncate",
        "shutil.rmtree",
        "sqlite3.connect",
    }
)
_EVIL = (
    "../../../outside",
    "/etc/passwd",
    "outside",
    "a\\u0000b",
    "\\u001b[2J",
    "\\ud800",
    "",
    "x" * 5000,
    "http://127.0.0.1:9/x",
    "mqtt://[::1",
    "mqtt://127.0.0.1:99999999",
    "/usr/lib/python3.11/subprocess.py:getoutput",
    "os:system",
    "~/x",
    "NaN",
    "-1",
    "1099511627776",
    "16777216",
    "1e999",
    "C:\\\\x",
    "%s%n",
    "{0.__class__}",
)


@dataclass
class FileReadings:
    """What came of the changed files.

    Attributes:
        refused: how many by kind.
        used: how many by kind; their changes left them whole.
        slowest_seconds: the longest reading, of the processor.
        seconds: of all.
    """

    refused: Counter[str]
    used: Counter[str]
    slowest_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def count(self) -> int:
        """Readings in all."""
        return self.refused.total() + self.used.total()


class Watch:
    """Sees what this process opens, changes and starts while a file is read.

    Args:
        folder: in which everything may happen.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder.resolve())
        self._roots = tuple(sorted({sys.prefix, sys.base_prefix, *map(os.path.abspath, sys.path)}))
        self._seen: list[str] = []
        self._is_on = False
        self._is_own = False
        sys.addaudithook(self._note)

    @contextlib.contextmanager
    def watching(self, *, own: bool, programs: bool = False) -> Iterator[None]:
        """Watch while a file is read.

        Args:
            own: whether the file may name others anywhere, which are then read.
            programs: whether programs of Shoal may be started.

        Raises:
            AssertionError: something was opened or started that no file may bring about.
        """
        self._seen = []
        self._is_own = own
        self._is_on = not programs
        try:
            yield
        finally:
            self._is_on = False
        if self._seen:
            raise AssertionError(f"it made this process: {self._seen[:5]}")

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_on:
            return
        if event in _STARTED:
            self._seen.append(f"{event} {arguments[:2]!r}")
        elif event == "open":
            self._note_opened(*arguments)
        elif event in _CHANGES and not self._is_inside(arguments[0]):
            self._seen.append(f"{event} {arguments[:2]!r}")

    def _note_opened(self, path: object, mode: object, flags: object) -> None:
        writes = bool(int(flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
        # A path is followed from the root, folder by folder.
        is_folder = bool(int(flags or 0) & os.O_DIRECTORY)
        if is_folder or self._is_inside(path) or (self._is_own and not writes):
            return
        self._seen.append(f"open {path!r} {mode!r}")

    def _is_inside(self, path: object) -> bool:
        if isinstance(path, int):  # an open file
            return True
        text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else str(path)
        text = text.removeprefix("file://").partition("?")[0]
        # A name without a folder is opened in one that is open already.
        if "/" not in text or text.startswith(("/dev/null", "/proc/self", "/proc/meminfo")):
            return True
        full = os.path.abspath(text)  # noqa: PTH100  (resolving would open folders)
        return full.startswith((self._folder, *self._roots))


def changed(data: bytes, other: bytes, draw: random.Random) -> bytes:
    """Return a file with changes of its bytes, or of one of its texts and numbers."""
    if draw.random() < 0.5:
        return mutated(data, other, draw)
    places = list(re.finditer(rb'"(?:[^"\\\n]|\\.){0,200}"|\b\d+(?:\.\d+)?\b', data[:100_000]))
    if not places:
        return mutated(data, other, draw)
    place = draw.choice(places)
    text = draw.choice(_EVIL)
    quoted = text if place[0].isdigit() and draw.random() < 0.5 else f'"{text}"'
    return data[: place.start()] + quoted.encode() + data[place.end() :]


def fuzz(count: int, seconds: float, seed: int, folder: Path, group: str) -> FileReadings:
    """Use changed files of a group until there are enough of them, or the time is over.

    Args:
        count: readings.
        seconds: after which it ends.
        seed: of the changes.
        folder: an empty one, in memory where possible.
        group: one of `GROUPS`.

    Raises:
        AssertionError: a file led outside, started something, or took too long.
        Exception: whatever a reader raised that is no error of Shoal.
    """
    draw = random.Random(seed)
    readings = FileReadings(Counter(), Counter())
    (folder / _CANARY).mkdir(parents=True)
    kinds = list(file_kinds(folder / "files", group))
    others = [sample for kind in kinds for sample in kind.samples]
    shares = [kind.share for kind in kinds]
    watch = Watch(folder / "files")
    for kind in kinds:  # what is imported at the first use is imported now
        for sample in kind.samples:
            kind.use(sample)
    began = time.monotonic()
    while readings.count < count and time.monotonic() - began < seconds:
        if readings.count % 500 == 0:  # each call starts a thread
            faulthandler.dump_traceback_later(30 * HANG_SECONDS, exit=True)
        kind = draw.choices(kinds, shares)[0]
        data = changed(draw.choice(kind.samples), draw.choice(others), draw)
        try:
            tally = readings.used if _is_used(kind, data, watch, readings) else readings.refused
        except BaseException:
            print(f"{kind.name}: {data!r}", file=sys.stderr)
            raise
        tally[kind.name] += 1
    faulthandler.cancel_dump_traceback_later()
    if list((folder / _CANARY).iterdir()) or len(list(folder.iterdir())) != 2:
        raise AssertionError(f"there is something beside the files in {folder}")
    readings.seconds = time.monotonic() - began
    return readings


def _is_used(kind: FileKind, data: bytes, watch: Watch, readings: FileReadings) -> bool:
    """Return whether a changed file was used; else it was refused by name."""
    start = time.thread_time()
    is_used = True
    programs = kind.name == "a release on a board"
    try:
        with watch.watching(own=kind.own, programs=programs):
            try:
                kind.use(data)
            except (ShoalError, RefusedByLauncherError):
                is_used = False
    finally:
        taken = time.thread_time() - start
        readings.slowest_seconds = max(readings.slowest_seconds, taken)
    if taken > HANG_SECONDS:
        raise AssertionError(f"it took {taken:.1f} s")
    return is_used


def main() -> None:
    """Print one line of JSON, and end with an error where something was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000, help="readings in all")
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which a group ends")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--groups", nargs="*", default=GROUPS)
    args = parser.parse_args()
    memory = "/dev/shm"
    parent = memory if Path(memory).is_dir() else None
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=parent) as folder, ProcessPoolExecutor() as processes:
        count = -(-args.count // len(args.groups))
        fuzz_group = partial(_fuzz_group, count, args.seconds, args.seed, Path(folder))
        running = [processes.submit(fuzz_group, group) for group in args.groups]
        parts = []
        failures = []
        for future in running:
            try:
                parts.append(future.result())
            except AssertionError as error:
                failures.append(str(error))
    now = datetime.now(timezone.utc)
    record = {
        "date": f"{now:%Y-%m-%d}",
        "seed": args.seed,
        "count": sum(part.count for part in parts),
        "seconds": round(time.monotonic() - began),
        "slowest_ms": round(1000 * max((part.slowest_seconds for part in parts), default=0.0), 1),
        "refused": dict(sum((part.refused for part in parts), Counter[str]())),
        "used": dict(sum((part.used for part in parts), Counter[str]())),
    }
    print(json.dumps(record))
    # The record of the other groups counts.
    if failures:
        raise SystemExit("\n".join(failures))


def _fuzz_group(count: int, seconds: float, seed: int, folder: Path, group: str) -> FileReadings:
    try:
        return fuzz(count, seconds, seed, folder / group, group)
    except Exception as error:  # noqa: BLE001  (whatever a reader raises ends the group)
        # Some errors of libraries cannot be sent to another process.
        raise AssertionError(f"{group}: {type(error).__name__}: {error}") from None


if __name__ == "__main__":
    main()
