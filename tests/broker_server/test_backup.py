"""`shoal backup` and `restore`: a store is taken while its server works, and goes on elsewhere as
it was.
"""

import contextlib
import errno
import json
import shutil
import signal
import sqlite3
import sys
import zipfile
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest

from broker_server.service.backup_keys import user_signer
from broker_server.store import Store, TaskPhase, backup, restoring
from broker_server.store.backup import back_up
from broker_server.store.export import load_version
from broker_server.store.machine import FINAL, RoundState
from broker_server.store.privacy_spent import epsilon_after, epsilon_by_round
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.errors import BlobError, ConfigError, StorageError
from shoal.cli.main import main
from tests.broker_server.conftest import Running
from tests.broker_server.peer import Peer, honest, profile
from tests.broker_server.test_resume import expected, start_dying, weights_of


def restore(file, store):
    """Restore a backup of one's own."""
    restoring.restore(file, store, known={user_signer().public})


@pytest.fixture
def killed(url, config, fleet, tmp_path):
    """A run whose server was killed with one update of the first round on its disk; its devices are
    still there.
    """
    settings = config(
        round={"rounds": 2, "min_devices": 2, "retries": 3}, evaluation={"data": None}
    )
    narrow = profile(max_width=0.5)
    with Peer(fleet, "a", url, honest(1.0)), Peer(fleet, "b", url, honest(3.0), profile=narrow):
        assert start_dying(settings, url, "receive", 1, tmp_path).wait(60) == -signal.SIGKILL
        yield settings


def test_a_restored_store_goes_on_where_it_was(killed, url, running, tmp_path):
    """With the update that was acknowledged, though the store it came from is gone."""
    file = tmp_path / "store.zip"
    elsewhere = killed.model_copy(update={"store": tmp_path / "elsewhere"})
    assert back_up(killed.store, file, [user_signer()]) >= 3
    shutil.rmtree(killed.store)
    restore(file, elsewhere.store)
    assert [oct(path.stat().st_mode)[-3:] for path in (file, elsewhere.store)] == [
        "600",
        "700",
    ]  # the model is in it
    with contextlib.closing(Store(elsewhere.store, read_only=True)) as store:
        before, *_ = [
            task for task in store.tasks(store.runs()[0].id, 1) if task.phase is TaskPhase.RECEIVED
        ]
    finished = running(elsewhere, url).wait()
    assert finished.status == "finished"
    found = weights_of(elsewhere, finished.run, 2)
    wanted = expected(elsewhere)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=1e-6)
    with contextlib.closing(Store(elsewhere.store, read_only=True)) as store:
        assert store.task(before.id).update_digest == before.update_digest


def test_backups_of_a_run_in_progress_are_each_whole(url, config, fleet, running, tmp_path):
    """Taken as fast as they can be, while versions come and old ones are dropped: nothing that
    counts is missing.
    """
    settings = config(round={"rounds": 8}, evaluation={"data": None}, keep_versions=1)
    seen = set()
    with Peer(fleet, "d", url, honest()):
        server = running(settings, url)
        while not seen or max(seen)[0] < 8:
            if (settings.store / "shoal.db").is_file():
                with contextlib.suppress(StorageError):  # before the first tables are there
                    back_up(settings.store, tmp_path / "store.zip", [user_signer()])
                    restore(tmp_path / "store.zip", tmp_path / "copy")
                    with contextlib.closing(Store(tmp_path / "copy", read_only=True)) as store:
                        begun = store.runs()
                    if begun:
                        seen.add(newest(tmp_path / "copy"))
                    shutil.rmtree(tmp_path / "copy")
        assert server.wait().status == "finished"
    assert len(seen) > 3
    assert {path.name for path in settings.store.iterdir() if path.is_dir()} == {
        "blobs",
        "updates",
        "configurations",
    }


def test_no_server_commits_between_the_database_and_the_links(tmp_path, monkeypatch):
    """It waits for the moment that these take, so that no blob goes which the copy still names."""
    Store(tmp_path / "store").close()
    copy = backup._copy
    tried = []

    def copying(source, target):
        copy(source, target)
        with contextlib.closing(sqlite3.connect(source, timeout=0)) as server:
            with pytest.raises(sqlite3.OperationalError, match="database is locked"):
                server.execute("DELETE FROM runs")
            tried.append(True)

    monkeypatch.setattr(backup, "_copy", copying)
    back_up(tmp_path / "store", tmp_path / "store.zip", [user_signer()])
    assert tried


def newest(folder):
    """Of a store that keeps one version: what it needs is there."""
    blobs = BlobStore(folder / "blobs")
    updates = BlobStore(folder / "updates")
    with contextlib.closing(Store(folder, read_only=True)) as store:
        run = store.runs()[0].id
        version = store.version(run)
        last = store.last_round(run)
        blobs.read(version.digest)
        open_round = last is not None and last.state not in FINAL
        for task in (
            store.tasks(run, last.number) if open_round and last.version == version.number else ()
        ):
            blobs.read(task.weights.digest)
            if task.phase is TaskPhase.RECEIVED:
                updates.read(task.update_digest)
    return version.number, open_round


def damage(file, out, kind):
    data = bytearray(file.read_bytes())
    if kind == "torn":
        data = data[: len(data) // 2]
    elif kind == "a bit of a blob":
        with zipfile.ZipFile(file) as archive:
            data[
                archive.getinfo(next(n for n in archive.namelist() if "objects" in n)).header_offset
                + 200
            ] ^= 1
    elif kind == "no zip":
        data = bytearray(b"a letter")
    out.write_bytes(data)
    if kind in {"out of the folder", "another database"}:
        name = "../outside" if kind == "out of the folder" else "shoal.db"
        with zipfile.ZipFile(file) as old, zipfile.ZipFile(out, "w") as new:
            new.comment = old.comment
            new.writestr(name, b"something")


@pytest.mark.parametrize(
    "kind", ["torn", "a bit of a blob", "no zip", "out of the folder", "another database"]
)
def test_what_is_no_whole_backup_makes_no_store(kind, tmp_path):
    """The folder is not made, nothing is left beside it, and nothing is written elsewhere."""
    with contextlib.closing(Store(tmp_path / "store")) as store:
        store.log("said", "something")
    BlobStore(tmp_path / "store" / "blobs").put(b"x" * 1000)
    assert back_up(tmp_path / "store", tmp_path / "good.zip", [user_signer()]) == 1
    damage(tmp_path / "good.zip", tmp_path / "bad.zip", kind)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(BlobError, match=r"bad\.zip"):
        restore(tmp_path / "bad.zip", tmp_path / "made")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", [".", "..", "backups"])
def test_a_backup_is_not_written_to_a_folder(name, tmp_path, monkeypatch):
    """The message names a file in it."""
    (tmp_path / "backups").mkdir()
    monkeypatch.chdir(tmp_path)
    Store(tmp_path / "store").close()
    with pytest.raises(
        StorageError, match=r"is a folder, .*name a file in it, such as .*store\.zip"
    ):
        back_up(tmp_path / "store", Path(name), [user_signer()])


@pytest.mark.slow
def test_of_a_damaged_store_no_backup_is_made(killed, tmp_path):
    """It could not be restored, and would take the place of one that can; an export names the
    damage and leaves it.
    """
    file = tmp_path / "store.zip"
    back_up(killed.store, file, [user_signer()])
    good = file.read_bytes()
    database = killed.store / "shoal.db"
    with contextlib.closing(Store(killed.store, read_only=True)) as store:
        version = store.version(store.runs()[0].id, 0)
        path = BlobStore(killed.store / "blobs").path(version.digest)
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        with pytest.raises(
            BlobError, match=r"blobs/objects/.* is damaged, so no backup was written"
        ):
            back_up(killed.store, file, [user_signer()])
        with pytest.raises(BlobError, match="of version 0, is damaged; `shoal restore` a backup"):
            load_version(store, version.run, 0)
        assert path.read_bytes() == whole[:-1]
    path.write_bytes(whole)
    with contextlib.closing(sqlite3.connect(database)) as opened:
        opened.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (page,) = opened.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = 'tasks'"
        ).fetchone()
    data = bytearray(database.read_bytes())
    data[4096 * (page - 1) : 4096 * page] = bytes(4096)
    database.write_bytes(data)
    with pytest.raises(StorageError, match=r"cannot copy the database of .*"):
        back_up(killed.store, file, [user_signer()])
    assert file.read_bytes() == good


def test_a_damaged_update_costs_its_round_and_not_the_run(killed, url, fleet, running):
    """Its device is asked again in another one."""
    for path in (killed.store / "updates").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:100])
    with (
        Peer(fleet, "a", url, honest(1.0)),
        Peer(fleet, "b", url, honest(3.0), profile=profile(max_width=0.5)),
    ):
        finished = running(killed, url).wait()
    assert finished.status == "finished", finished.error
    with contextlib.closing(Store(killed.store, read_only=True)) as store:
        first, *others = store.rounds(finished.run)
    assert first.state is RoundState.ABANDONED
    assert [item.state for item in others] == [RoundState.CLOSED] * 2


def test_a_damaged_newest_version_is_named_and_ends_no_run(killed, url, running):
    """It would be sent to boards, which refuse it over and over; once it is mended, the run goes
    on.
    """
    with contextlib.closing(Store(killed.store, read_only=True)) as store:
        version = store.version(store.runs()[0].id)
    path = BlobStore(killed.store / "blobs").path(version.digest)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with Running(killed, url) as server:
        finished = server.wait()
    assert (finished.status, finished.exit_code) == ("stopped", StorageError.exit_code)
    assert (
        f"{path}, of version 0, is damaged; `shoal restore` a backup; the run has not ended"
        in finished.error
    )
    path.write_bytes(whole)
    again = running(killed, url).wait()
    assert (again.run, again.status) == (finished.run, "finished")


def test_the_commands_say_what_they_did(tmp_path, monkeypatch, capsys):
    """A folder that is there is not touched; a store that is not there is not made."""
    Store(tmp_path / "store").close()

    def shoal(*arguments):
        monkeypatch.setattr(sys, "argv", ["shoal", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, "".join(capsys.readouterr())

    file = tmp_path / "store.zip"
    signer = user_signer()
    own = f"{signer.words} (key {signer.public[:16]})"
    assert shoal("backup", tmp_path / "store", file, "--json")[0] == 0
    code, said = shoal("restore", file, tmp_path / "copy")
    assert (code, said) == (0, f"restored {tmp_path / 'copy'} from {file}, signed by {own}\n")
    told = json.loads(shoal("restore", file, tmp_path / "again", "--json")[1])
    assert told == {"path": str(tmp_path / "again"), "signed_by": [own]}
    code, said = shoal("restore", file, tmp_path / "copy")
    assert (code, "exists already; stop its server and move it away" in " ".join(said.split())) == (
        2,
        True,
    ), said
    code, said = shoal("backup", tmp_path / "none", tmp_path / "none.zip")
    assert (code, "there is no store" in said) == (7, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "again",
        "copy",
        "store",
        "store.zip",
    ]


@pytest.mark.parametrize(("options", "times"), [((), 3), (("--lost-rounds", 2), 4)])
@pytest.mark.slow
def test_rounds_that_are_closed_once_more_count_twice(
    url, config, fleet, running, tmp_path, monkeypatch, capsys, options, times
):
    """The lost server may have released their sums with other noise, and two releases tell more
    than one.
    """
    settings = config(
        round={"rounds": 2, "min_devices": 2, "retries": 3},
        evaluation={"data": None, "statistics": "server-batch"},
        privacy={"clip": 1.0, "noise_multiplier": 20.0, "delta": 1e-5},
    )
    file = tmp_path / "store.zip"
    copy = tmp_path / "copy"
    arguments = ["shoal", "restore", str(file), str(copy), *map(str, options)]
    monkeypatch.setattr(sys, "argv", arguments)
    with Peer(fleet, "a", url, honest(1.0)), Peer(fleet, "b", url, honest(3.0)):
        assert start_dying(settings, url, "receive", 1, tmp_path).wait(60) == -signal.SIGKILL
        with pytest.raises(SystemExit):
            back_up_and_restore(settings.store, file)
        assert "counts twice in epsilon" in " ".join(capsys.readouterr().out.split())
        finished = running(settings.model_copy(update={"store": copy}), url).wait()
    assert finished.status == "finished", finished.error
    with contextlib.closing(Store(copy, read_only=True)) as store:
        spent = epsilon_by_round(store, store.run(finished.run))
    counted = {1: 2, 2: times}
    assert spent == {at: epsilon_after(settings.privacy, count) for at, count in counted.items()}


def back_up_and_restore(store, file):
    back_up(store, file, [user_signer()])
    main()


def test_restore_never_overwrites(tmp_path):
    Store(tmp_path / "store").close()
    back_up(tmp_path / "store", tmp_path / "store.zip", [user_signer()])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("dear")
    with pytest.raises(ConfigError, match="use another folder"):
        restore(tmp_path / "store.zip", tmp_path / "mine")
    assert (tmp_path / "mine" / "letter").read_text() == "dear"


def test_a_file_system_without_links_gets_a_copy(tmp_path, monkeypatch):
    """As exFAT and some network file systems, which answer a link with an error."""
    digest = BlobStore(tmp_path / "store" / "blobs").put(b"weights")
    Store(tmp_path / "store").close()

    def refuse(link, _target):
        raise PermissionError(errno.EPERM, "Operation not permitted", str(link))

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    assert back_up(tmp_path / "store", tmp_path / "store.zip", [user_signer()]) == 1
    with ZipFile(tmp_path / "store.zip") as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(digest)]
        assert archive.read(name) == b"weights"
