"""Lists that are watched: shown again when the store is written, never in between, until the
operator interrupts.
"""

import io
import json
import signal
import threading
import time
from contextlib import closing, redirect_stdout

import pytest

from broker_server.settings.fleet import FleetConfig
from broker_server.store import Store, VersionRecord, following
from broker_server.store.records import RunRecord
from fleet_protocol.errors import ConfigError, StorageError
from fleet_protocol.locks import held
from fleet_protocol.messages import DeviceStatus
from shoal.cli.main import app as command
from tests.shoal.view.stores import roll_out

RUN = "20260101-000000-abcd"


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A run without rounds, and files that are looked at often."""
    monkeypatch.setattr(following, "LOOK_SECONDS", 0.01)
    config = FleetConfig.model_validate(
        {"fleet": "lab", "model": {"arch": "mlp"}}
    ).model_dump_json()
    run = RunRecord(RUN, "lab", "mlp", config, "running", None, time.time(), None, 0, 0)
    with closing(Store(tmp_path)) as opened:
        opened.add_run(run, VersionRecord(RUN, 0, 0, "0" * 64, None, None, time.time(), None))
    return tmp_path


class Terminal(io.StringIO):
    """What is printed; after each of the given marks the next thing happens, and a signal after the
    last.
    """

    def __init__(self, mark, happens, *, tty=False):
        super().__init__()
        self.mark = mark
        self.happens = list(happens)
        self.tty = tty

    def isatty(self):
        return self.tty

    def write(self, text):
        super().write(text)
        if self.mark in text:
            (self.happens.pop(0) if self.happens else lambda: signal.raise_signal(signal.SIGINT))()
        return len(text)


def noted(store):
    def write():
        with closing(Store(store)) as opened:
            opened.log("said", "something", run=RUN)

    return write


@pytest.mark.parametrize(
    "typed",
    [
        "status",
        "devices",
        "runs",
        "rounds",
        "versions",
        "advice",
        "log",
        "rollout show --folder FOLDER",
    ],
)
def test_a_line_of_json_each_time_it_is_written(store, typed):
    """One at first, one after the write, and Ctrl-C ends it without an error."""
    noted(store)()  # a log without a line has nothing to print
    roll_out(store, ["pi-1", "pi-2"])
    words = typed.replace("FOLDER", str(store)).split()
    with redirect_stdout(Terminal("\n", [noted(store)])) as out:
        command([*words, "--store", str(store), "--watch", "--json"], standalone_mode=False)
    assert len([json.loads(line) for line in out.getvalue().splitlines()]) == 2


def test_a_terminal_is_drawn_again(store):
    """Cleared before each look, so that the newest stands alone; nothing is drawn while nothing is
    written.
    """
    with redirect_stdout(Terminal("refused:", [noted(store)], tty=True)) as out:
        command(["status", "--store", str(store), "--watch"], standalone_mode=False)
    assert out.getvalue().count("\x1b[2J") == out.getvalue().count("0 of 20 rounds closed") == 2


def test_a_store_that_is_not_written_is_not_looked_into(store):
    """Once at first, and never again while a hundred looks at its files find nothing new."""
    over = threading.Event()
    looks = iter(range(100))
    over.wait = lambda _seconds: next(looks, None) is None and over.set()
    assert len(list(following.changes(store, over))) == 1


def test_it_ends_with_the_run_that_is_named(store):
    """What came with the end is shown; a run that is not there is said."""

    def end():
        with closing(Store(store)) as opened:
            opened.end_run(RUN, "finished", None)

    with redirect_stdout(Terminal("\n", [end, lambda: None])) as out:
        command(
            ["status", "--store", str(store), "--run", RUN[:8], "--watch", "--json"],
            standalone_mode=False,
        )
    assert [json.loads(line)["run.status"] for line in out.getvalue().splitlines()] == [
        "running",
        "finished",
    ]
    with pytest.raises(ConfigError, match="has no run nope"):
        command(
            ["rounds", "--store", str(store), "--run", "nope", "--watch"], standalone_mode=False
        )
    with pytest.raises(StorageError, match="no store in"):
        command(["runs", "--store", str(store / "none"), "--watch"], standalone_mode=False)


def test_what_a_killed_server_knew_of_devices_is_no_longer_said_of_now(store, capsys):
    """A device was connected when it was killed; whether it still is nobody knows."""
    status = DeviceStatus(fleet="lab", device="attic", online=True, state="idle")
    with closing(Store(store)) as opened:
        opened.record_device(status)

    def shown(*options):
        command(["devices", "--store", str(store), *options], standalone_mode=False)
        return capsys.readouterr().out

    with held(store, "a server works here"):
        served = shown()
        assert json.loads(shown("--json"))[0]["served"] is True
    assert "yes" in served
    assert "unknown" not in served
    unserved = shown()
    assert "unknown" in unserved
    assert "1 of 1 devices were online when the last server ended; `shoal up`" in unserved
    assert "yes" not in unserved
    assert json.loads(shown("--json"))[0]["served"] is False
