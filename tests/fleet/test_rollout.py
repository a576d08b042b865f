"""Releases over the air, with a real server, broker, launcher and agents; good ones, bad ones,
power cuts.
"""

import signal
import threading
import time

import pytest

from broker_server.service.rollout import read_rollout, start_rollout, store_rollout
from device_runtime.agent.releases import RESTART
from fleet_protocol.identity.release import board_kind
from shoal.flash.tree import Entry, packed
from tests.brokers import without_mosquitto
from tests.device_runtime.device_process import REPOSITORY
from tests.fleet.boards import SEPARATE, SITE, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    without_mosquitto,
]

ALL = {"stages": (0.5, 1.0), "most_failed": 0.0, "within_seconds": 600.0}


def built(**changes):
    """A release of this source; changes are (old, new) texts by file, with ``__`` for a slash."""
    tree = [Entry(f"{SITE}/separate.pth", SEPARATE.encode())]
    for package in ("device_runtime", "fleet_protocol"):
        for path in sorted(
            source for source in (REPOSITORY / package).rglob("*.*") if source.suffix != ".pyc"
        ):
            name = path.relative_to(REPOSITORY).as_posix()
            old, new = changes.get(name.removesuffix(".py").replace("/", "__"), ("", ""))
            content = path.read_bytes()
            assert old.encode() in content
            tree.append(
                Entry(
                    f"{SITE}/{name}",
                    content.replace(old.encode(), new.encode()) if old else content,
                )
            )
    return {board_kind(): packed(tree)}


def begin_as(folder, builds, **changes):
    return start_rollout(folder, builds, 1, **{**ALL, **changes})


def test_a_broken_release_stops_at_the_canary_and_a_good_one_goes_to_all(lab):
    """The one does not import: one board says so, the other is not asked. The other is tried, heard
    and kept.
    """
    folder, up, board = lab
    server = up()
    boards = [board(index) for index in range(2)]
    until(lambda: len(server._devices.releases()) == 2, boards[0].log)
    bad = begin_as(
        folder, built(device_runtime__main=("import argparse", "import argparse, no_such_module"))
    )
    until(lambda: read_rollout(folder).stopped, boards[0].log, boards[1].log)
    assert "no_such_module" in read_rollout(folder).stopped
    assert sorted(fleet_board.record.split(" ")[0] for fleet_board in boards) == [
        "failed",
        "running",
    ]
    assert len(read_rollout(folder).asked) == 1
    number = begin_as(folder, built()).release.number
    assert number > bad.release.number
    until(
        lambda: all(fleet_board.record == f"running {number} 0 0" for fleet_board in boards),
        *(fleet_board.log for fleet_board in boards),
    )
    asked = read_rollout(folder).asked
    assert sorted(asked) == ["device-0", "device-1"]
    assert len(set(asked.values())) == 2  # the canary first
    assert all(set(fleet_board.codes) == {RESTART} for fleet_board in boards), boards[0].log()
    until(
        lambda: (
            [release_record.split(" ")[0] for release_record in server._devices.releases().values()]
            == ["running"] * 2
        )
    )
    assert set(read_rollout(folder).outcomes(server._devices.releases(), time.time()).values()) == {
        "running"
    }


def test_a_release_whose_onnxruntime_does_not_train_is_never_tried(lab):
    """Everything imports and connects; but its self-test takes twenty steps, and the loss stays as
    it is.
    """
    folder, up, board = lab
    server = up()
    lone_board = board(0)
    until(server._devices.releases, lone_board.log)
    lame = built(
        device_runtime__training__backends__swapping=("self._current = 1 - self._current", "pass")
    )
    number = begin_as(folder, lame, stages=(1.0,)).release.number
    until(lambda: read_rollout(folder).stopped, lone_board.log)
    assert lone_board.record.startswith(
        f"failed {number} 0 0 its self-test failed: twenty training steps change the loss from"
    )


def test_a_release_that_fails_in_a_round_goes_no_further(lab):
    """It is heard and chosen, and refuses its task: the rollout stops. A good one goes on once each
    has done a task.
    """
    folder, up, board = lab
    server = up(rounds=100_000)
    boards = [board(index) for index in range(2)]
    until(
        lambda: len(server._devices.releases()) == 2, *(fleet_board.log for fleet_board in boards)
    )
    ends = "    check_parameters(session.parameters(), schedule.round, step)\n"
    bad = built(
        device_runtime__training__epochs=(
            ends,
            f"    raise ArithmeticError('a bad release')\n{ends}",
        )
    )
    begin_as(folder, bad, gate=1)
    until(lambda: read_rollout(folder).stopped, *(fleet_board.log for fleet_board in boards))
    assert "in a round: failed: ArithmeticError: a bad release" in read_rollout(folder).stopped
    assert len(read_rollout(folder).asked) == 1
    number = begin_as(folder, built(), gate=1).release.number
    until(
        lambda: list(read_rollout(folder).judged.values()) == ["", ""],
        *(fleet_board.log for fleet_board in boards),
    )
    assert {tuple(fleet_board.record.split(" ")[:2]) for fleet_board in boards} == {
        ("running", str(number))
    }
    assert not read_rollout(folder).stopped


def test_a_release_that_cannot_read_the_settings_is_taken_back(lab):
    """An older one lacks a key of device.toml, say: an error that only an operator can mend, but
    for the way back.
    """
    folder, up, board = lab
    server = up()
    lone_board = board(0)
    until(lambda: len(server._devices.releases()) == 1, lone_board.log)
    older = built(device_runtime__settings=("    repair_seconds: Seconds = 2.0\n", ""))
    number = begin_as(folder, older, stages=(1.0,)).release.number
    until(lambda: read_rollout(folder).stopped, lone_board.log)
    assert (
        lone_board.record == f"failed {number} 0 0 it ended 3 times before the fleet had heard it"
    )
    assert "unknown key 'repair_seconds'" in lone_board.log()
    assert set(lone_board.codes) == {RESTART}
    until(lambda: server._devices.online, lone_board.log)


def test_a_board_that_pauses_is_not_asked_and_not_late(lab):
    """In quiet hours it would fetch nothing, and stop the rollout by that."""
    folder, up, board = lab
    server = up()
    lone_board = board(0)
    until(server._devices.releases, lone_board.log)
    settings = lone_board.folder / "device.toml"
    awake = settings.read_text()
    settings.write_text(
        f'{awake}[conditions]\nquiet_hours = ["00:00-12:00", "12:00-23:59"]\nsettle_seconds = 1\n'
    )
    lone_board.cut()
    until(
        lambda: any(
            profile.unable.startswith("paused") for profile in server._devices.profiles().values()
        ),
        lone_board.log,
    )
    number = begin_as(folder, built(), stages=(1.0,), within_seconds=60.0).release.number
    threading.Event().wait(3.0)
    assert not read_rollout(folder).asked
    store_rollout(
        folder,
        lambda: read_rollout(folder).model_copy(update={"asked": {"device-0": time.time() - 61.0}}),
    )
    threading.Event().wait(3.0)  # as if it had been asked before it paused
    assert not read_rollout(folder).stopped
    settings.write_text(awake)
    lone_board.cut()
    until(lambda: lone_board.record == f"running {number} 0 0", lone_board.log)


def test_boards_are_not_late_for_the_time_without_a_server(lab):
    """Whoever was asked has its time again when one is there."""
    folder, up, board = lab
    number = begin_as(folder, built(), stages=(1.0,), within_seconds=60.0).release.number
    store_rollout(
        folder,
        lambda: read_rollout(folder).model_copy(update={"asked": {"device-0": time.time() - 61.0}}),
    )
    up()
    lone_board = board(0)
    until(
        lambda: lone_board.record == f"running {number} 0 0" or read_rollout(folder).stopped,
        lone_board.log,
    )
    assert not read_rollout(folder).stopped


def test_a_release_that_the_server_does_not_hear_is_taken_back(lab):
    """It connects, but says nothing of itself: in time the one before runs again, says why, and the
    rollout stops.
    """
    folder, up, board = lab
    server = up()
    lone_board = board(0, connect_seconds=6.0)
    until(server._devices.releases, lone_board.log)
    mute = built(
        device_runtime__agent__uplink=(
            "if profile is not None and",
            "if False and profile is not None and",
        )
    )
    number = begin_as(folder, mute).release.number
    until(lambda: read_rollout(folder).stopped, lone_board.log)
    assert (
        lone_board.record
        == f"failed {number} 0 0 the server did not receive a message from it in time"
    )
    assert "did not receive a message" in read_rollout(folder).stopped


@pytest.mark.attack(
    "broker",
    "Sends an unsigned or older runtime",
    "refused as `forged` or `replayed`",
    "2026-11-23",
)
def test_what_the_operator_did_not_sign_or_signed_before_is_not_taken(lab):
    """A server that was taken over: a release of its own, and an old one once a newer was in
    hand.
    """
    folder, up, board = lab
    old = begin_as(folder, {board_kind(): b"old"})
    new = begin_as(folder, {board_kind(): b"no archive"})
    server = up()
    lone_board = board(0)
    until(
        lambda: lone_board.record.startswith(f"failed {new.release.number} 0 0 it cannot be read"),
        lone_board.log,
    )
    until(lambda: "failed" in str(server._devices.releases()))
    forged = new.model_copy(
        update={
            "signed": new.signed[:-6] + "20207d",
            "asked": {"device-0": time.time()},
            "most_failed": 1.0,
        }
    )
    for request, words in (
        (forged, "refused, forged"),
        (old.model_copy(update={"asked": forged.asked, "most_failed": 1.0}), "refused, replayed"),
    ):
        store_rollout(folder, lambda request=request: request)
        until(lambda words=words: words in lone_board.log(), lone_board.log)
    assert lone_board.record.startswith(f"failed {new.release.number} 0 0")


def test_power_cuts_on_the_way_leave_a_board_that_goes_on(lab):
    """Killed while it fetches, in its self-test, and on trial: at last the release runs."""
    folder, up, board = lab
    server = up()
    lone_board = board(0)
    until(server._devices.releases, lone_board.log)
    number = begin_as(folder, built(), stages=(1.0,)).release.number
    arriving = lone_board.folder / "state" / "parts"
    seen = []
    for name, there in (
        ("fetching", lambda: any(arriving.glob("*")) or "fetched" in lone_board.record),
        ("fetched", lambda: lone_board.record.startswith(f"fetched {number}")),
        ("trial", lambda: lone_board.record.startswith(f"trial {number}")),
    ):
        until(there, lone_board.log, lambda: lone_board.record)
        lone_board.cut()
        seen.append(name)
    until(
        lambda: lone_board.record.startswith(f"running {number} 0"),
        lone_board.log,
        lambda: lone_board.record,
    )
    assert -signal.SIGKILL in lone_board.codes
    until(lambda: f"running {number}" in str(server._devices.releases()))
