"""One holder at a time, who is named to the others, and a deadline for those who wait."""

import errno
import os
import threading

import pytest

from fleet_protocol.errors import ConfigError, StorageError, TransportError
from fleet_protocol.locks import LOCKS, held, hold, is_held

fcntl = pytest.importorskip("fcntl", reason="this system has no such locks")

pytestmark = pytest.mark.skipif(not LOCKS, reason="this system has no such locks")


@pytest.mark.parametrize("name", ["a file", "."])
def test_who_comes_second_hears_who_is_first(tmp_path, name):
    with (
        held(tmp_path / name, "not now"),
        pytest.raises(ConfigError) as found,
        held(tmp_path / name, "not now"),
    ):
        pass
    assert str(found.value) == f"not now (process {os.getpid()} holds it)"
    with held(tmp_path / name, "not now"):
        pass


def test_who_waits_goes_on_when_the_first_lets_go(tmp_path):
    (tmp_path / "file").touch()
    descriptor = hold(tmp_path / "file")
    threading.Timer(0.3, os.close, [descriptor]).start()
    with held(tmp_path / "file", "not now", seconds=60):
        pass


def test_what_cannot_be_held_is_named(tmp_path):
    """A folder that is not there, or a card that can only be read: the system's word, and no
    trace.
    """
    with (
        pytest.raises(StorageError, match=r"cannot lock .*gone/lock: No such file"),
        held(tmp_path / "gone" / "lock", ""),
    ):
        pass


def test_nobody_waits_for_ever(tmp_path):
    with (
        held(tmp_path / "file", "not now"),
        pytest.raises(TransportError, match="not now"),
        held(tmp_path / "file", "not now", seconds=0.2, error=TransportError),
    ):
        pass


def test_what_goes_wrong_while_it_is_held_lets_go_and_is_told(tmp_path):
    with pytest.raises(OSError, match="mine"), held(tmp_path, "not now"):
        raise OSError("mine")
    with held(tmp_path, "not now"):
        pass


def _lock_as_nfs_does(monkeypatch):
    """Refuse exclusive locks through descriptors that cannot write."""
    flock = fcntl.flock

    def refuse(descriptor, kind):
        may_write = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        if kind & fcntl.LOCK_EX and not may_write:
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_a_folder_on_nfs_is_locked_by_a_file_in_it(tmp_path, monkeypatch):
    _lock_as_nfs_does(monkeypatch)
    assert is_held(tmp_path) is False
    assert list(tmp_path.iterdir()) == []  # a look makes no file
    with held(tmp_path, "not now"):
        assert is_held(tmp_path) is True
        with pytest.raises(ConfigError, match="not now"), held(tmp_path, "not now"):
            pass
    assert is_held(tmp_path) is False


def test_a_look_refuses_nobody(tmp_path):
    """A command that looks whether a server is there holds the lock for an instant."""
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    threading.Timer(0.05, os.close, [descriptor]).start()
    with held(tmp_path, "not now"):
        assert is_held(tmp_path) is True


def test_what_cannot_be_locked_is_not_known(tmp_path):
    assert is_held(tmp_path / "gone") is None
