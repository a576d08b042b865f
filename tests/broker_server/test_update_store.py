"""Updates that share files: found again after a kill, written over when nobody needs them, and
never half there.
"""

import contextlib
import errno
import os

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.strategies import integers

from broker_server.store import update_store
from broker_server.store.update_store import FOLDER, UpdateStore, updates_in
from fleet_protocol.digests import blob_digest
from fleet_protocol.errors import BlobError, StorageError
from fleet_protocol.weights import encode_weights


def update(number, values=100):
    return encode_weights({"w": np.full(values, number, np.float32)}, {"task": f"t{number}"})


def keep(store, *blobs):
    names = [blob_digest(data) for data in blobs]
    for name, data in zip(names, blobs, strict=True):
        store.keep(name, data)
    store.sync(names)
    return names


def files(store):
    return sorted((store.root / FOLDER).iterdir())


@pytest.fixture
def opened(tmp_path):
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(contextlib.closing(UpdateStore(tmp_path / "updates")))


def test_many_updates_are_in_one_file_and_a_killed_server_finds_them(opened):
    """Also beside what was torn off behind them; others, in files of their own, are found as
    ever.
    """
    store = opened()
    blobs = [update(number) for number in range(20)]
    names = keep(store, *blobs)
    alone = store.put(b"a file of its own")
    (path,) = files(store)
    with path.open("ab") as file:
        file.write(update(99)[:-1])
    again = opened()
    assert [again.read(name) for name in (*names, alone)] == [*blobs, b"a file of its own"]
    assert again.tensors(names[7])["w"].tolist() == [7.0] * 100
    with pytest.raises(BlobError, match="not in"):
        again.read(blob_digest(b"never seen"))
    assert [name for name, _, _ in updates_in(path)] == names


def test_a_file_is_written_over_when_nothing_in_it_is_needed_and_no_backup_has_it(opened, tmp_path):
    """As long as one update is needed, the others' places stay as they are."""
    store = opened()
    first, second = keep(store, update(1), update(2))
    store.remove(first)
    assert store.read(second) == update(2)
    store.remove(second)
    (third,) = keep(store, update(3))
    (path,) = files(store)
    assert next(name for name, _, _ in updates_in(path)) == third
    (tmp_path / "backup").hardlink_to(path)
    store.remove(third)
    (fourth,) = keep(store, update(4))
    assert next(name for name, _, _ in updates_in(tmp_path / "backup")) == third
    assert store.read(fourth) == update(4)
    store.remove(fourth)
    store.trim()
    assert files(store) == []


def test_a_full_disk_leaves_nothing_half_there(opened, monkeypatch):
    """What was synced before stays; what was not is forgotten, taken again, and found again after a
    kill.
    """
    store = opened()
    (before,) = keep(store, update(0))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(update_store, "write_all", full)
        with pytest.raises(StorageError, match="disk is full"):
            keep(store, update(1), update(2))
    with pytest.raises(BlobError, match="not in"):
        store.read(blob_digest(update(1)))
    after = keep(store, update(1), update(2))
    assert [opened().read(name) for name in (before, *after)] == [update(0), update(1), update(2)]
    store.clear()
    assert not [path for path in store.root.rglob("*") if path.is_file()]


@pytest.mark.parametrize("durable", [True, False])
def test_updates_that_were_synced_would_survive_a_power_cut(tmp_path, monkeypatch, durable):
    """With one sync for all that were written together, and none in a simulation."""
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(
        os,
        "fsync",
        lambda descriptor: (fsync(descriptor), synced.append(os.fstat(descriptor).st_size)),
    )
    blobs = [update(number) for number in range(3)]
    with contextlib.closing(UpdateStore(tmp_path / "updates", durable=durable)) as store:
        keep(store, *blobs)
    assert synced == ([sum(map(len, blobs))] if durable else [])


class Kept(RuleBasedStateMachine):
    """Whatever comes, goes and is killed in between: what was synced and not removed can be
    read.
    """

    def __init__(self):
        super().__init__()
        self.folder = self.root / str(next(self.count))
        self.number = 0
        self.store = UpdateStore(self.folder, durable=False)
        self.needed = {}

    @rule(values=integers(0, 400), removed_before_it_is_written=integers(0, 1))
    def comes(self, values, removed_before_it_is_written):
        self.number += 1
        data = update(self.number, values)
        self.store.keep(name := blob_digest(data), data)
        if removed_before_it_is_written:
            self.store.remove(name)
            return
        self.needed[name] = data

    @precondition(lambda self: self.needed)
    @rule(which=integers(0, 1000))
    def goes(self, which):
        name = sorted(self.needed)[which % len(self.needed)]
        del self.needed[name]
        self.store.remove(name)

    @rule()
    def ends(self):
        self.store.sync(self.needed)
        self.store.close()
        self.store = UpdateStore(self.folder, durable=False)

    @invariant()
    def all_is_there(self):
        assert {name: self.store.read(name) for name in self.needed} == self.needed

    def teardown(self):
        self.store.close()


def test_what_is_needed_is_there_whatever_comes_and_goes(tmp_path, monkeypatch):
    """With files so small that each gets a few updates, and writes of two or three."""
    monkeypatch.setattr(update_store, "_FILE_BYTES", 4000)
    monkeypatch.setattr(update_store, "_WRITE_BYTES", 1500)
    machine = type("Here", (Kept,), {"root": tmp_path, "count": iter(range(100_000))}).TestCase
    machine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
    machine("runTest").runTest()
