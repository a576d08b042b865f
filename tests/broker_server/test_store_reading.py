"""A store that is opened to be read is not changed, by not so much as a file beside it."""

import contextlib
import signal
import subprocess
import sys
import threading

import pytest

from broker_server.store import Store, opening
from broker_server.store.schema import SCHEMA_VERSION
from fleet_protocol.errors import StorageError
from tests.broker_server.store_fixture import restore

KILLED = """
import os, signal, sys
from pathlib import Path
from broker_server.store import Store
store = Store(Path(sys.argv[1]))
store.log("said", "before the end")
store.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""

LOOK = """
import sys
import threading
from pathlib import Path
from broker_server.store import Store
print(Store(Path(sys.argv[1]), read_only=True).events()[-1].detail)
"""

BEGINS = """
import os
import sys
from pathlib import Path
from broker_server.store import Store
folder = Path(sys.argv[1])
store = Store(folder)
store.log("said", "while at work")
store.flush()
with (folder / "shoal.db-shm").open("r+b", buffering=0) as index:
    header = index.read(136)
    index.seek(0)
    index.write(bytes(len(header)))
    print("empty", flush=True)
    sys.stdin.read()
    index.seek(0)
    index.write(header)
    os._exit(0)
"""


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@contextlib.contextmanager
def unwritable(folder):
    """Nothing in the folder can be changed while the block lasts; root could, so that bytes are
    compared as well.
    """
    before = bytes_of(folder)
    for path in (*folder.iterdir(), folder):
        path.chmod(0o555 if path == folder else 0o444)
    try:
        yield
    finally:
        folder.chmod(0o755)
        for path in folder.iterdir():
            path.chmod(0o644)
    assert bytes_of(folder) == before


def closed(folder):
    with contextlib.closing(Store(folder)) as store:
        store.log("said", "before the end")


def killed(folder):
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert (folder / "shoal.db-wal").stat().st_size


@pytest.mark.parametrize("leave", [closed, killed])
def test_reading_changes_nothing(leave, tmp_path):
    """Neither the database nor what SQLite keeps beside it, where a killed server's last words
    still stand.
    """
    folder = tmp_path / "with spaces, 100 % ü ?#"
    leave(folder)
    with unwritable(folder), contextlib.closing(Store(folder, read_only=True)) as store:
        assert [event.detail for event in store.events()] == ["before the end"]
        with pytest.raises(StorageError, match="was opened read-only: nothing can be written"):
            store.log("said", "by a reader")


@pytest.mark.parametrize("version", range(3, SCHEMA_VERSION))
def test_reading_a_store_of_an_earlier_version_does_not_upgrade_it(version, tmp_path):
    """It is upgraded in memory alone, where nothing can be written that would be lost."""
    folder = tmp_path / "store"
    restore(version, folder)
    with unwritable(folder), contextlib.closing(Store(folder, read_only=True)) as store:
        assert len(store.runs()) == 2
        with pytest.raises(StorageError, match="was opened read-only: nothing can be written"):
            store.log("said", "by a reader")


def test_a_reader_sees_what_a_server_at_work_commits(tmp_path):
    """One that was opened before the server started reads on while it works, and after it ended."""
    closed(tmp_path)
    with contextlib.closing(Store(tmp_path, read_only=True)) as reader:
        with contextlib.closing(Store(tmp_path)) as server:
            for number in range(3):
                server.log("said", str(number))
                server.flush()
                assert reader.events()[-1].detail == str(number)
        assert len(reader.events()) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["shoal.db"]


def test_a_look_from_another_process_leaves_the_files_of_a_server_alone(tmp_path):
    """Not even SQLite's shared index is marked, so that a reader without the right to write gets to
    see the store.
    """
    with contextlib.closing(Store(tmp_path)) as server:
        server.log("said", "while at work")
        server.flush()
        before = bytes_of(tmp_path)
        done = subprocess.run(
            [sys.executable, "-c", LOOK, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.strip() == "while at work"
        assert "shoal.db-shm" in before
        assert bytes_of(tmp_path) == before


def test_a_copy_that_lacks_the_index_of_its_log_is_read(tmp_path):
    """Copied with ``-wal`` and without ``-shm``: SQLite must make the index anew, here it may."""
    killed(tmp_path)
    (tmp_path / "shoal.db-shm").unlink()
    with contextlib.closing(Store(tmp_path, read_only=True)) as store:
        assert len(store.events()) == 1


def test_reading_does_not_make_a_store(tmp_path):
    """A view of a folder without a store says so and leaves no file behind."""
    with pytest.raises(StorageError, match="no store in"):
        Store(tmp_path / "nothing", read_only=True)
    assert not (tmp_path / "nothing").exists()


def test_a_server_that_ends_while_the_store_is_opened_disturbs_nobody(tmp_path, monkeypatch):
    """What was there when a reader looked is gone when it opens: it looks again, and gives up where
    nothing changes.
    """
    closed(tmp_path)
    used = "&readonly_shm=1"
    found = []

    def look(path, really=opening._how_to_read):
        found.append(used if not found else really(path))
        return found[-1]

    monkeypatch.setattr(opening, "_how_to_read", look)
    with contextlib.closing(Store(tmp_path, read_only=True)) as reading:
        assert reading.events()[-1].detail == "before the end"
    assert found[:2] == [used, "&immutable=1"]
    monkeypatch.setattr(opening, "_how_to_read", lambda _path: used)
    with pytest.raises(StorageError, match="unable to open"):
        Store(tmp_path, read_only=True)


def test_a_log_that_vanishes_while_it_is_looked_at_is_none(tmp_path):
    """A server that ends removes its log between any two looks of a reader."""
    database = tmp_path / "shoal.db"
    log = tmp_path / "shoal.db-wal"
    over = threading.Event()

    def toggle() -> None:
        while not over.is_set():
            log.write_bytes(b"x")
            log.unlink()

    server = threading.Thread(target=toggle)
    server.start()
    try:
        options = {opening._how_to_read(database) for _ in range(20_000)}
    finally:
        over.set()
        server.join()
    assert options <= {"", "&immutable=1"}


@contextlib.contextmanager
def unwritten_index(folder):
    """A server in another process, in whose index of the log there is nothing yet, as while SQLite
    makes it; yields what has it written.
    """
    server = subprocess.Popen(
        [sys.executable, "-c", BEGINS, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with server:
        assert server.stdout.readline() == b"empty\n"
        try:
            yield server.stdin.close
        finally:
            server.stdin.close()
            server.wait(60)


def test_a_reader_waits_for_a_server_that_begins(tmp_path):
    """It came between a server's first look at its log and the index that the server makes of it,
    and failed with "attempt to write a readonly database".
    """
    closed(tmp_path)
    with unwritten_index(tmp_path) as write:
        timer = threading.Timer(0.2, write)
        timer.start()
        try:
            with contextlib.closing(Store(tmp_path, read_only=True)) as reader:
                assert reader.events()[-1].detail == "while at work"
        finally:
            timer.join()


def test_an_index_that_nobody_writes_is_waited_for_no_longer_than_a_transaction(
    tmp_path, monkeypatch
):
    """Then the reader gives up with a reason."""
    monkeypatch.setattr(opening, "BUSY_SECONDS", 0.1)
    closed(tmp_path)
    with (
        unwritten_index(tmp_path),
        pytest.raises(StorageError, match="readonly database; it is read-only; check"),
    ):
        Store(tmp_path, read_only=True)


def test_what_a_reader_saw_first_it_sees_until_the_end(tmp_path):
    """Whatever a server does meanwhile, so no later query of a transaction can fail by it."""
    closed(tmp_path)
    with contextlib.closing(Store(tmp_path)) as server:
        server.log("said", "first")
        server.flush()
        with contextlib.closing(opening._connect_to_read(tmp_path / "shoal.db")) as connection:
            server.log("said", "second")
            server.flush()
            query = "SELECT detail FROM events ORDER BY id DESC LIMIT 1"
            assert connection.execute(query).fetchone() == ("first",)
        assert server.events()[-1].detail == "second"
