"""Releases over the air, with a real server, broker, launcher and agents; good ones, bad ones, power cuts."""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import pytest

from broker_server.service.authority import Founding, enroll, found_fleet
from broker_server.service.rollout import begin, keep_rollout, read_rollout
from broker_server.service.server import Server
from broker_server.settings.fleet import BrokerConfig
from device_runtime.agent.releases import RESTART
from fleet_protocol.identity.release import kind_of
from shoal.flash.bundle import read_part
from shoal.flash.tree import Entry, packed
from tests.brokers import free_port
from tests.device_runtime.device_process import REPOSITORY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin"), reason="mosquitto is not installed"
    ),
]

PATIENCE_SECONDS = 240.0
SITE = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
SEPARATE = "\n".join([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
ALL = {"stages": (0.5, 1.0), "most_failed": 0.0, "within_seconds": 600.0}


def built(**changes):
    """A release of this source; changes are (old, new) texts by file, with ``__`` for a slash."""
    tree = [Entry(f"{SITE}/separate.pth", SEPARATE.encode())]
    for package in ("device_runtime", "fleet_protocol"):
        for path in sorted(each for each in (REPOSITORY / package).rglob("*.*") if each.suffix != ".pyc"):
            name = path.relative_to(REPOSITORY).as_posix()
            old, new = changes.get(name.removesuffix(".py").replace("/", "__"), ("", ""))
            content = path.read_bytes()
            assert old.encode() in content
            tree.append(Entry(f"{SITE}/{name}", content.replace(old.encode(), new.encode()) if old else content))
    return {kind_of(): packed(tree)}


class Board:
    """A board whose unit starts the launcher again whenever it ends."""

    def __init__(self, folder, enrolment, data, connect_seconds=30.0):
        self.folder, self.releases, self.codes, self.starts = folder, folder / "state" / "releases", [], 0
        (folder / "base/bin").mkdir(parents=True)
        (folder / "base" / SITE).mkdir(parents=True)
        (folder / "base" / SITE / "separate.pth").write_text(f"{REPOSITORY}\n{SEPARATE}\n")
        (folder / "base/pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
        (folder / "base/bin/python").symlink_to(Path(sys.executable).resolve())
        (folder / "base/bin/launch").write_bytes(read_part("launch.sh"))
        (folder / "base/bin/launch").chmod(0o755)
        (folder / "device.toml").write_text(
            f'state_dir = "state"\nrepair_seconds = 0.5\nconnect_timeout_seconds = {connect_seconds}\n'
            f'[identity]\nfile = "{enrolment}"\n[data]\nkind = "npz"\npath = "{data}"\n'
        )
        self._over = threading.Event()
        self._process = None
        self._unit = threading.Thread(target=self._serve)

    def __enter__(self):
        self._unit.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self.cut()
        self._unit.join(60)

    def _serve(self):
        command = [self.folder / "base/bin/launch", self.releases, "device", "run", "--config", "device.toml"]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        while not self._over.is_set():
            self.starts += 1
            with (self.folder / "log").open("ab") as log:
                self._process = subprocess.Popen(
                    list(map(str, command)), cwd=self.folder, env=environment, stdout=log, stderr=log
                )
                self.codes.append(self._process.wait())
            self._over.wait(0.2)

    def cut(self):
        """A power cut."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)

    @property
    def record(self):
        with contextlib.suppress(OSError):
            return (self.releases / "record").read_text().strip()
        return "running 0 0 0"

    def log(self):
        return (self.folder / "log").read_text()


def until(what, *about):
    patience = time.monotonic() + PATIENCE_SECONDS
    while not what():
        assert time.monotonic() < patience, [each() if callable(each) else each for each in about]
        threading.Event().wait(0.02)


@pytest.fixture
def lab(ground):
    """A server that is up, and the folder of its fleet."""
    with contextlib.ExitStack() as stack:
        folder, port = ground.folder / "lab", free_port()
        found_fleet(folder, Founding("test", "127.0.0.1", port, "mosquitto"))
        config = BrokerConfig(url="mosquitto", port=port, identity=folder / "server.enrolment")
        paths = [enroll(folder, f"device-{index}") for index in range(2)]

        def up(rounds=0):
            server = stack.enter_context(Server("test", ground.folder / "store", config))
            run = ground.config("embedded", rounds=rounds or 1, min_devices=1).model_copy(update={"broker": config})

            def work():
                """Runs, one after the other: one ends where nobody is left who trains."""
                for seed in itertools.count():
                    if server.run(run.model_copy(update={"seed": seed})).status == "stopped":
                        return

            serving = threading.Thread(target=work if rounds else server.serve)
            serving.start()
            stack.callback(serving.join, 60)
            stack.callback(server.stop)
            return server

        def board(index, **options):
            made = Board(ground.folder / f"board-{index}", paths[index], ground.data / f"device-{index}.npz", **options)
            return stack.enter_context(made)

        yield folder, up, board


def begin_as(folder, builds, **changes):
    return begin(folder, builds, 1, **{**ALL, **changes})


def test_a_broken_release_stops_at_the_canary_and_a_good_one_goes_to_all(lab):
    """The one does not import: one board says so, the other is not asked. The other is tried, heard and kept."""
    folder, up, board = lab
    server = up()
    boards = [board(index) for index in range(2)]
    until(lambda: len(server._known.releases()) == 2, boards[0].log)
    bad = begin_as(folder, built(device_runtime__main=("import argparse", "import argparse, no_such_module")))
    until(lambda: read_rollout(folder).stopped, boards[0].log, boards[1].log)
    assert "no_such_module" in read_rollout(folder).stopped
    assert sorted(each.record.split(" ")[0] for each in boards) == ["failed", "running"]
    assert len(read_rollout(folder).asked) == 1
    number = begin_as(folder, built()).release.number
    assert number > bad.release.number
    until(lambda: all(each.record == f"running {number} 0 0" for each in boards), *(each.log for each in boards))
    asked = read_rollout(folder).asked
    assert sorted(asked) == ["device-0", "device-1"]
    assert len(set(asked.values())) == 2  # the canary first
    assert all(set(each.codes) == {RESTART} for each in boards), boards[0].log()
    until(lambda: [said.split(" ")[0] for said in server._known.releases().values()] == ["running"] * 2)
    assert set(read_rollout(folder).outcomes(server._known.releases(), time.time()).values()) == {"running"}


def test_a_release_whose_onnxruntime_does_not_train_is_never_tried(lab):
    """Everything imports and connects; but its self-test takes twenty steps, and the loss stays as it is."""
    folder, up, board = lab
    server, one = up(), board(0)
    until(server._known.releases, one.log)
    lame = built(device_runtime__training__backends__swapping=("self._current = 1 - self._current", "pass"))
    number = begin_as(folder, lame, stages=(1.0,)).release.number
    until(lambda: read_rollout(folder).stopped, one.log)
    assert one.record.startswith(f"failed {number} 0 0 its self-test failed: twenty training steps take the loss from")


def test_a_release_that_fails_in_a_round_goes_no_further(lab):
    """It is heard and chosen, and refuses its task: the rollout stops. A good one goes on once each has done a task."""
    folder, up, board = lab
    server = up(rounds=100_000)
    boards = [board(index) for index in range(2)]
    until(lambda: len(server._known.releases()) == 2, *(each.log for each in boards))
    ends = "    seconds = time.monotonic() - started\n"
    bad = built(device_runtime__training__epochs=(ends, f"    raise ArithmeticError('a bad release')\n{ends}"))
    begin_as(folder, bad, gate=1)
    until(lambda: read_rollout(folder).stopped, *(each.log for each in boards))
    assert "in a round: failed: ArithmeticError: a bad release" in read_rollout(folder).stopped
    assert len(read_rollout(folder).asked) == 1
    number = begin_as(folder, built(), gate=1).release.number
    until(lambda: list(read_rollout(folder).judged.values()) == ["", ""], *(each.log for each in boards))
    assert {tuple(each.record.split(" ")[:2]) for each in boards} == {("running", str(number))}
    assert not read_rollout(folder).stopped


def test_a_release_that_the_server_does_not_hear_is_taken_back(lab):
    """It connects, but says nothing of itself: in time the one before runs again, says why, and the rollout stops."""
    folder, up, board = lab
    server, one = up(), board(0, connect_seconds=6.0)
    until(server._known.releases, one.log)
    mute = built(device_runtime__agent__uplink=("if profile is not None and", "if False and profile is not None and"))
    number = begin_as(folder, mute).release.number
    until(lambda: read_rollout(folder).stopped, one.log)
    assert one.record == f"failed {number} 0 0 the server did not hear it in time"
    assert "did not hear" in read_rollout(folder).stopped


def test_what_the_operator_did_not_sign_or_signed_before_is_not_taken(lab):
    """A server that was taken over: a release of its own, and an old one once a newer was in hand."""
    folder, up, board = lab
    old = begin_as(folder, {kind_of(): b"old"})
    new = begin_as(folder, {kind_of(): b"no archive"})
    server, one = up(), board(0)
    until(lambda: one.record.startswith(f"failed {new.release.number} 0 0 it cannot be read"), one.log)
    until(lambda: "failed" in str(server._known.releases()))
    forged = new.model_copy(
        update={"signed": new.signed[:-6] + "20207d", "asked": {"device-0": time.time()}, "most_failed": 1.0}
    )
    for said, words in (
        (forged, "refused, forged"),
        (old.model_copy(update={"asked": forged.asked, "most_failed": 1.0}), "refused, replayed"),
    ):
        keep_rollout(folder, lambda said=said: said)
        until(lambda words=words: words in one.log(), one.log)
    assert one.record.startswith(f"failed {new.release.number} 0 0")


def test_power_cuts_on_the_way_leave_a_board_that_goes_on(lab):
    """Killed while it fetches, in its self-test, and on trial: at last the release runs."""
    folder, up, board = lab
    server, one = up(), board(0)
    until(server._known.releases, one.log)
    number = begin_as(folder, built(), stages=(1.0,)).release.number
    parts, seen = one.folder / "state" / "parts", []
    for name, there in (
        ("fetching", lambda: any(parts.glob("*")) or "fetched" in one.record),
        ("fetched", lambda: one.record.startswith(f"fetched {number}")),
        ("trial", lambda: one.record.startswith(f"trial {number}")),
    ):
        until(there, one.log, lambda: one.record)
        one.cut()
        seen.append(name)
    until(lambda: one.record.startswith(f"running {number} 0"), one.log, lambda: one.record)
    assert -signal.SIGKILL in one.codes
    until(lambda: f"running {number}" in str(server._known.releases()))
