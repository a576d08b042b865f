"""The configurations that a store keeps of its runs: whose are believed, and what the file of one
may be.
"""

import contextlib
import os
import shutil
import stat
import threading
from pathlib import Path

import pytest

from broker_server.store import Store
from broker_server.store.configurations import FOLDER, read_saved_config, save_config, saved_config
from broker_server.store.user_key import user_key_path, user_signer
from fleet_protocol.errors import ConfigError, StorageError
from fleet_protocol.private_folders import make_private_folder

RUN = "20260101-000000-abcd"
PATIENCE = 20

posix = pytest.mark.skipif(os.name != "posix", reason="rights and pipes of POSIX")


@pytest.fixture(autouse=True)
def _mine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "me"))


@pytest.fixture
def store(tmp_path, config):
    """The folder of a store with a kept configuration."""
    folder = tmp_path / "project" / "store"
    with contextlib.closing(Store(folder)):
        assert save_config(folder, RUN, config(store=folder).model_dump_json()) is None
    return folder


def file_of(store):
    return store / FOLDER / f"{RUN}.json"


def test_what_this_users_server_kept_counts(store, caplog):
    """Without a line in the log."""
    assert saved_config(store, RUN).store == store
    assert not caplog.messages


def test_it_counts_where_the_folder_was_moved(store):
    """With its paths as they are now."""
    moved = store.parent.rename(store.parent.with_name("moved")) / "store"
    assert saved_config(moved, RUN).store == moved


def test_what_somebody_else_has_signed_counts_as_none(store, monkeypatch, tmp_path, caplog):
    """As in a folder that a stranger packed, for one who has a key and for one who has none."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another"))
    assert saved_config(store, RUN) is None
    assert "you have no key yet" in caplog.text
    assert not user_key_path().exists()  # a look makes none
    user_signer()
    assert saved_config(store, RUN) is None
    assert "is not signed with your key" in caplog.text


def test_a_copy_of_ones_own_store_counts_as_none(store, tmp_path):
    """Its signature is genuine, but somebody else could have put other files beside it."""
    copy = Path(shutil.copytree(store.parent, tmp_path / "copy")) / "store"
    assert "is a copy" in read_saved_config(copy, RUN)
    assert saved_config(store, RUN) is not None


def test_it_counts_for_its_run_alone(store):
    """Another one's file, or what was changed in it, is not signed."""
    shutil.copy(file_of(store), store / FOLDER / "another.json")
    assert "signed for another run" in read_saved_config(store, "another")
    text = file_of(store).read_text()
    file_of(store).write_text(text.replace('rounds\\":', 'rounds\\":1'))
    assert file_of(store).read_text() != text
    assert "changed since" in read_saved_config(store, RUN)


@pytest.mark.parametrize(
    "form", ["the configuration alone", "no signature", "half a signature", "nothing"]
)
def test_what_has_no_signature_counts_as_none(form, store, config):
    """As an earlier Shoal kept it, or a server without a key."""
    alone = config(store=store).model_dump_json()
    whole = file_of(store).read_text()
    texts = {
        "the configuration alone": alone,
        "no signature": whole[: whole.index(',"signature"')] + "}",
        "half a signature": whole[:-22] + '"}',
        "nothing": "",
    }
    file_of(store).write_text(texts[form])
    assert "sign" in read_saved_config(store, RUN)


def test_a_user_who_can_have_no_key_keeps_and_is_told(tmp_path, config, monkeypatch):
    """A server whose home can only be read does runs; it goes on with them by its own file
    alone.
    """
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    folder = tmp_path / "store"
    with contextlib.closing(Store(folder)):
        said = save_config(folder, RUN, config(store=folder).model_dump_json())
    assert "set XDG_CONFIG_HOME to a folder" in said
    assert "not signed" in read_saved_config(folder, RUN)


def as_pipe(path):
    path.unlink()
    os.mkfifo(path, 0o600)


def as_link(path):
    path.rename(path.parent.parent / "elsewhere.json")
    path.symlink_to(path.parent.parent / "elsewhere.json")


def as_folder(path):
    path.unlink()
    path.mkdir()


def folder_as_link(path):
    path.parent.rename(path.parent.parent / "elsewhere")
    path.parent.symlink_to(path.parent.parent / "elsewhere")


def folder_as_file(path):
    shutil.rmtree(path.parent)
    path.parent.touch()


STRANGE = {
    "pipe": as_pipe,
    "link": as_link,
    "folder": as_folder,
    "no text": lambda path: path.write_bytes(b"\xff\xfe{}"),
    "large": lambda path: os.truncate(path, 1024 * 1024 + 1),
    "writable": lambda path: path.chmod(0o660),
    "link of the folder": folder_as_link,
    "file of the folder": folder_as_file,
    "writable folder": lambda path: path.parent.chmod(0o770),
}


@posix
@pytest.mark.parametrize("kind", STRANGE)
def test_a_strange_file_is_refused_with_what_to_do(kind, store):
    """At once: nobody waits for who might write into a pipe."""
    STRANGE[kind](file_of(store))
    said = []

    def read():
        with pytest.raises(ConfigError, match=r"remove it") as caught:
            read_saved_config(store, RUN)
        said.append(caught)

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    reading.join(PATIENCE)
    assert len(said) == 1


@posix
@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022])
def test_a_store_is_for_its_owner_alone(mask, tmp_path, config):
    """Whatever the mask of new files says."""
    before = os.umask(mask)
    try:
        folder = tmp_path / "store"
        with contextlib.closing(Store(folder)):
            save_config(folder, RUN, config(store=folder).model_dump_json())
    finally:
        os.umask(before)
    for path in (folder, folder / FOLDER):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(file_of(folder).stat().st_mode) == 0o600


@posix
def test_a_folder_that_others_may_write_is_closed_to_them(tmp_path):
    """Those who may read it may still."""
    folder = tmp_path / "store"
    folder.mkdir()
    folder.chmod(0o777)
    make_private_folder(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


@posix
def test_a_folder_for_everybody_is_no_store(tmp_path):
    """Such as /tmp, whose rights are not changed."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    with pytest.raises(StorageError, match="chmod go-w"):
        make_private_folder(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away"
)
def test_another_users_folder_that_others_may_write_is_no_store(tmp_path):
    """It is not ours to change."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    folder.chmod(0o777)
    os.chown(folder, 1234, 1234)
    with pytest.raises(StorageError, match="chmod go-w"):
        make_private_folder(folder)


def test_two_processes_make_one_key(monkeypatch):
    """Whose is there first counts for both."""
    keys = []
    ready = threading.Barrier(8)

    def make():
        ready.wait(PATIENCE)
        keys.append(user_signer().public)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(PATIENCE)
    assert len(keys) == 8
    assert len(set(keys)) == 1
    assert [path.name for path in user_key_path().parent.iterdir()] == [user_key_path().name]
