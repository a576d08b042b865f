"""What the disk or the database cannot take for a while ends no run: it goes on as the run it
was.
"""

import contextlib
import errno
import sqlite3
import threading
import time
import types

import pytest

from broker_server.service import clock as clocks
from broker_server.service import runs
from broker_server.service.following import RunRejectedError
from broker_server.service.launch import steer
from broker_server.store import Store, opening
from fleet_protocol import control
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.errors import ConfigError, StorageError
from fleet_protocol.transport import Connected, Disconnected
from tests.broker_server.conftest import Running
from tests.broker_server.peer import Peer, honest

NO_TESTS = {"evaluation": {"data": None}}


class Locked:
    """Holds the database of a store, as a backup does."""

    def __init__(self, folder):
        self._connection = sqlite3.connect(
            folder / "shoal.db", isolation_level=None, check_same_thread=False
        )

    def lock(self):
        self._connection.execute("BEGIN IMMEDIATE")

    def free(self):
        self._connection.execute("ROLLBACK")
        self._connection.close()


def runs_of(folder):
    with contextlib.closing(Store(folder, read_only=True)) as store:
        return [(run.id, run.status) for run in store.runs()]


@pytest.mark.slow
def test_a_database_that_is_locked_for_a_while_costs_time_only(url, config, running, fleet):
    """The server waits longer than a backup takes; the run is the same and loses no round."""
    settings = config(round={"rounds": 3}, **NO_TESTS)
    with Peer(fleet, "d", url, honest()):
        server = running(settings, url)
        server.wait_event(control.RoundClosed)
        locked = Locked(settings.store)
        locked.lock()
        threading.Timer(25.0, locked.free).start()
        finished = server.wait()
    assert (finished.status, finished.rounds) == ("finished", 3)


def test_a_run_whose_store_stays_locked_is_gone_on_with(url, config, running, fleet, monkeypatch):
    """It is not over: the command line ends with the store's exit code, and the same configuration
    continues it.
    """
    monkeypatch.setattr(opening, "PATIENT_SECONDS", 0.3)
    settings = config(round={"rounds": 3}, **NO_TESTS)
    with Peer(fleet, "d", url, honest()):
        server = running(settings, url)
        server.wait_event(control.RoundClosed)
        locked = Locked(settings.store)
        locked.lock()
        finished = server.wait()
        assert (finished.status, finished.exit_code) == ("stopped", StorageError.exit_code)
        assert "locked; another process, such as a backup" in finished.error
        assert "the run has not ended: start it again" in finished.error
        assert "INSERT" not in finished.error
        assert "sqlalche" not in finished.error
        locked.free()
        server.__exit__(None, None, None)
        assert runs_of(settings.store) == [(finished.run, "running")]
        again = running(settings, url).wait()
    assert (again.run, again.status, again.rounds) == (finished.run, "finished", 3)


def test_a_server_that_is_up_goes_on_by_itself_when_the_disk_has_room_again(
    url, config, fleet, monkeypatch
):
    """A full disk stops the run; once there is room it is resumed without anybody asking, and
    ends.
    """
    monkeypatch.setattr(runs, "RETRY_SECONDS", 0.5)
    full = threading.Event()
    put = BlobStore.put

    def putting(self, *parts, **how):
        if full.is_set():
            raise StorageError(f"cannot write to {self.root}: no space left on device")
        return put(self, *parts, **how)

    monkeypatch.setattr(BlobStore, "put", putting)
    settings = config(round={"rounds": 3}, **NO_TESTS)
    with Peer(fleet, "d", url, honest()):
        first = Running(settings, url)
        with first:
            first.wait_event(control.RoundClosed)
            full.set()
            stopped = first.wait()
        assert (stopped.status, stopped.exit_code) == ("stopped", StorageError.exit_code)
        second = Running(settings, url)
        second._work = second.server.serve
        second._thread = threading.Thread(target=second.server.serve, daemon=True)
        with second:
            waiting = second.wait_event(control.RunFinished)
            assert waiting.status == "stopped"
            full.clear()
            with second.changed:
                assert second.changed.wait_for(
                    lambda: any(
                        event.status == "finished"
                        for event in second.events_of(control.RunFinished)
                    ),
                    30,
                )
    assert runs_of(settings.store) == [(stopped.run, "finished")]


def test_a_run_that_waits_for_room_on_the_disk_can_be_steered(url, config, fleet, monkeypatch):
    """Its operator is not told that there is none: it is tried again at once, or ended for good."""

    def full(self, *_parts, **_how):
        raise StorageError(f"cannot write to {self.root}: no space left on device")

    settings = config(round={"rounds": 3}, broker={"url": url}, **NO_TESTS)
    with Peer(fleet, "d", url, honest()):
        first = Running(settings, url)
        with first:
            first.wait_event(control.RoundClosed)
            monkeypatch.setattr(BlobStore, "put", full)
            run = first.wait().run
        second = Running(settings, url)
        second._work = second.server.serve
        second._thread = threading.Thread(target=second.server.serve, daemon=True)
        with second:
            second.wait_event(control.RunFinished)
            with pytest.raises(RunRejectedError, match=f"run {run} cannot resume, so it is held"):
                steer(settings, "pause")
            with pytest.raises(RunRejectedError, match="no run is in progress"):
                steer(settings, "stop", "another")
            assert steer(settings, "go") == run  # without waiting for the next attempt
            with second.changed:
                assert second.changed.wait_for(
                    lambda: len(second.events_of(control.RunFinished)) == 2, 60
                )
            assert steer(settings, "stop") == run
            with pytest.raises(RunRejectedError, match="no run is in progress"):
                steer(settings, "stop")
    assert runs_of(settings.store) == [(run, "stopped")]


def test_after_a_full_disk_the_same_configuration_starts_no_new_run(
    url, config, running, fleet, monkeypatch
):
    """The run that the disk stopped is the one that is continued, and the only one of the store."""
    put = BlobStore.put
    count = iter(range(1000))

    def once_full(self, *parts, **how):
        if next(count) == 6:
            raise StorageError("no space left on device")
        return put(self, *parts, **how)

    monkeypatch.setattr(BlobStore, "put", once_full)
    settings = config(round={"rounds": 3}, **NO_TESTS)
    with Peer(fleet, "d", url, honest()):
        server = running(settings, url)
        found = server.wait()
        server.__exit__(None, None, None)
        assert found.status == "stopped"
        assert running(settings, url).wait().run == found.run
    assert runs_of(settings.store) == [(found.run, "finished")]


def test_a_disk_that_can_only_be_read_ends_no_run(url, config, running, fleet, monkeypatch):
    """The system mounts a damaged disk so: nothing can be deleted any more, and the next server
    goes on.
    """
    put = BlobStore.put
    there = threading.Event()

    def only_read(self, *parts, **how):
        if there.is_set():
            raise OSError(errno.EROFS, "Read-only file system", str(self.root))
        return put(self, *parts, **how)

    monkeypatch.setattr(BlobStore, "put", only_read)
    settings = config(round={"rounds": 3}, **NO_TESTS)
    with Peer(fleet, "d", url, honest()):
        server = running(settings, url)
        server.wait_event(control.RoundClosed)
        there.set()
        stopped = server.wait()
        assert (stopped.status, stopped.exit_code) == ("stopped", StorageError.exit_code)
        assert "Read-only file system" in stopped.error
        server.__exit__(None, None, None)
        there.clear()
        assert running(settings, url).wait().status == "finished"


def test_a_store_has_one_server(url, config, running, fleet, monkeypatch):
    """Two would do the rounds of one run side by side; the second ends, whatever broker it is on,
    and opens nothing.
    """
    settings = config(**NO_TESTS)
    first = running(settings, url)
    with monkeypatch.context() as patched:
        patched.setattr("broker_server.service.server.Store", None)
        with pytest.raises(ConfigError, match=r"another server uses the store .*stop it"):
            Running(settings, url).__enter__()
    with Peer(fleet, "d", url, honest()):
        assert first.wait().status == "finished"
    first.__exit__(None, None, None)
    with Running(settings, url):
        pass  # it was let go


def test_the_time_of_a_round_stands_still_while_the_broker_is_away(
    url, config, running, fleet, monkeypatch
):
    """Nobody can answer meanwhile: a broker that is away for an hour abandons no round, and offers
    do not pile up.
    """
    gone = threading.Event()
    late = 0.0
    back = threading.Event()

    class Watched(clocks.Clock):
        def stop(self):
            super().stop()
            gone.set()

    def waiting(peer, work):
        assert back.wait(60)
        honest()(peer, work)

    monkeypatch.setattr(runs, "Clock", Watched)
    now = types.SimpleNamespace(monotonic=lambda: time.monotonic() + late)
    monkeypatch.setattr(clocks, "time", now)
    settings = config(round={"nudge_seconds": 0.01, "deadline_seconds": 600}, **NO_TESTS)
    with Peer(fleet, "d", url, waiting):
        server = running(settings, url)
        server.wait_event(control.RoundStarted)
        offers = []
        offer = server.server._outbox.offer
        for turn in range(4):
            gone.clear()
            server.server._inbox.put(Disconnected("cut by the test"))
            assert gone.wait(30)
            if not turn:
                monkeypatch.setattr(
                    server.server._outbox, "offer", lambda *said: offers.append(said)
                )
        assert not offers
        monkeypatch.setattr(server.server._outbox, "offer", offer)
        late = 3600.0
        server.server._inbox.put(Connected(session_present=True))
        back.set()
        assert server.wait().status == "finished"
    assert not server.events_of(control.RoundAbandoned)
