"""Stores that somebody has packed with links, through which a server would write elsewhere."""

import contextlib
import os

import pytest

from broker_server.service.server import Server
from broker_server.settings.broker import BrokerConfig
from broker_server.store import Store
from broker_server.store.links import refuse_links
from fleet_protocol.errors import StorageError

PARTS = ("shoal.db", "shoal.db-wal", "blobs", "updates/batches", "configurations", "broker")


@pytest.fixture
def victim(tmp_path):
    """A folder of the user, which others may read."""
    folder = tmp_path / "victim"
    (folder / "objects").mkdir(parents=True)
    (folder / "mine.txt").write_text("mine")
    (folder / "mine.txt").chmod(0o644)
    return folder


def contents(folder):
    found = {}
    for path in sorted(folder.rglob("*")):
        found[path] = (path.stat().st_mode, path.read_bytes() if path.is_file() else b"")
    return found


@pytest.mark.attack(
    "file",
    "A store from somebody else has links in place of its database, its blobs or its other folders",
    "refused before anything is read, written or removed through a link; the error names the link",
    "2026-11-29",
)
@pytest.mark.parametrize("part", PARTS)
def test_a_store_with_links_is_not_served(part, victim, tmp_path):
    """The rights of the file behind a link were changed, or a new file made there."""
    store = tmp_path / "store"
    Store(store).close()
    place = store / part
    place.parent.mkdir(exist_ok=True)
    place.unlink(missing_ok=True)
    is_file = part.startswith("shoal.db")
    place.symlink_to(victim / "mine.txt" if is_file else victim)
    before = contents(victim)
    with (
        pytest.raises(StorageError, match=f"has a link, '.*{part}'"),
        Server("lab", store, BrokerConfig()),
    ):
        pass
    assert contents(victim) == before


@pytest.mark.attack(
    "file",
    "A store from somebody else has a link or a pipe in place of its database",
    "every command refuses the store immediately with an error that names the file, and creates "
    "no file elsewhere",
    "2026-11-29",
)
@pytest.mark.timeout(20)
@pytest.mark.parametrize("ending", ["", "-wal", "-shm"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_database_is_a_file(kind, ending, victim, tmp_path):
    """SQLite follows links, and makes a file where one leads to none."""
    store = tmp_path / "store"
    Store(store).close()
    place = store / f"shoal.db{ending}"
    place.unlink(missing_ok=True)
    if kind == "link":
        place.symlink_to(victim / "new.txt")
    else:
        os.mkfifo(place)
    before = contents(victim)
    for read_only in (True, False):
        with pytest.raises(StorageError, match=f"shoal.db{ending} is a link, or is not a file"):
            Store(store, read_only=read_only).close()
    assert contents(victim) == before


def test_the_folder_of_a_store_may_be_a_link(tmp_path):
    """As one that was moved to another disk; and a mounted secret is one."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "secret").write_text("a token of the server\n")
    store = tmp_path / "store"
    store.symlink_to(tmp_path / "disk")
    (store / "operator.token").symlink_to(tmp_path / "secret")
    with contextlib.closing(Store(store)) as opened:
        refuse_links(store)
        assert not opened.runs()
