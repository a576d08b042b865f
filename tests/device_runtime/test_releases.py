"""What a board takes of releases, and the record that it keeps; the launcher is tested where the
bundle is.
"""

import time

import pytest

from device_runtime.agent.cache import CacheIndex
from device_runtime.agent.releases import RESTART, TRANSITIONS, Releases
from device_runtime.main import run_device
from device_runtime.settings import DeviceConfig
from fleet_protocol.blobs import blob_ref
from fleet_protocol.data import NpzData
from fleet_protocol.errors import RefusedError
from fleet_protocol.identity.release import Release, board_kind
from fleet_protocol.transport import OperatorNotice


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A board with a launcher, after a start with some record."""
    monkeypatch.setenv("SHOAL_RELEASES", str(tmp_path))

    def make(record="", **settings):
        if record:
            (tmp_path / "record").write_text(record + "\n")
        data = NpzData(path=tmp_path / "x.npz")
        config = {
            "fleet": "lab",
            "device": "pi-1",
            "broker": "mqtt://h",
            "state_dir": tmp_path,
            "data": data,
            **settings,
        }
        return Releases(DeviceConfig.model_validate(config))

    return make


def release(number, **changes):
    return Release.model_validate(
        {"fleet": "lab", "number": number, "builds": {board_kind(): blob_ref(b"it")}, **changes}
    )


def test_on_trial_whatever_it_cannot_read_gives_way_to_the_one_before(made, tmp_path):
    """Exit code 2 keeps a unit from starting anything again; a release that runs has it as ever."""
    (tmp_path / "device.toml").write_text("no_such_key = 1")
    for record, code in (
        ("trial 7 0 1", RESTART),
        ("running 7 0 0", 2),
        ("failed 7 0 0 x", 2),
        ("", 2),
    ):
        made(record)
        assert run_device(tmp_path / "device.toml") == code, record
        (tmp_path / "record").unlink(missing_ok=True)


def test_without_a_launcher_no_release_is_taken(made, monkeypatch):
    """Nobody could go back."""
    monkeypatch.delenv("SHOAL_RELEASES")
    board = made()
    board.receive(OperatorNotice(False, release(7)))
    assert (board.record, board.wanted) == (None, None)


def test_a_release_that_fits_is_wanted_until_it_is_offered_no_more(made):
    """And is on disk as what is in hand when it is whole."""
    board = made()
    board.receive(OperatorNotice(False, release(7)))
    assert board.wanted == (release(7), blob_ref(b"it"))
    board.receive(OperatorNotice(False))
    assert board.wanted is None
    board.receive(OperatorNotice(False, release(7)))
    board.move("whole", 7, "/a file")
    assert (made().record, board.restarts, board.wanted) == ("fetched 7 0 0 /a file", True, None)


@pytest.mark.parametrize(
    ("changes", "settings", "why"),
    [
        (
            {"builds": {"riscv64-3.9": blob_ref(b"x")}},
            {},
            "it is for riscv64-3.9, and this board is",
        ),
        ({"expires": int(time.time()) - 1}, {}, "it has expired"),
        ({}, {"max_cache_bytes": 1}, "its 2 bytes are more than max_cache_bytes"),
    ],
)
def test_one_that_does_not_fit_is_told_and_tried_once(made, changes, settings, why):
    """What runs stays, and so does the number below which nothing is taken."""
    board = made("running 5 3 0", **settings)
    board.receive(OperatorNotice(False, release(7, **changes)))
    assert board.record.startswith(f"failed 7 5 0 {why}")
    assert not board.restarts
    board.receive(OperatorNotice(False, release(7)))
    assert board.wanted is None
    with pytest.raises(RefusedError, match="release 6 is older than release 7"):
        board.receive(OperatorNotice(False, release(6)))
    board = made()
    board.receive(OperatorNotice(False, release(8)))
    assert board.wanted == (release(8), blob_ref(b"it"))


def test_on_trial_nothing_newer_is_taken_until_it_is_heard(made):
    """By its own number; then it is what runs."""
    board = made("trial 7 5 1")
    assert board.trial_ends_at < float("inf")
    board.receive(OperatorNotice(False, release(8), heard=5))
    assert (board.record, board.wanted) == ("trial 7 5 1", None)
    board.receive(OperatorNotice(False, release(8), heard=7))
    assert (board.record, board.trial_ends_at, board.restarts) == (
        "running 7 5 0",
        float("inf"),
        False,
    )


def test_one_that_is_not_heard_gives_way(made):
    """To the one before, with the reason."""
    board = made("trial 7 5 1")
    board.move("silent", why="not\nheard")
    assert (made().record, board.restarts) == ("failed 7 5 0 not heard", True)


def test_a_damaged_record_is_none(made):
    """The launcher runs what the board was made with, too."""
    assert made("trial \0").record == "running 0 0 0"


def test_every_phase_has_a_way_out():
    """And each way leads to a phase of the table."""
    assert set(TRANSITIONS.values()) == {phase for phase, _ in TRANSITIONS}


def sets(number, *tiers, **changes):
    refs = {tier: blob_ref(tier.encode()) for tier in tiers}
    return Release.model_validate({"fleet": "lab", "number": number, "sets": refs, **changes})


@pytest.fixture
def member(made, tmp_path):
    """A board of a fleet with an operator, after some tasks of a tier; without a launcher it takes
    sets, too.
    """

    def make(tier="", **settings):
        newest = {"tier": tier} if tier else {}
        (tmp_path / "cache.json").write_text(CacheIndex(newest=newest).model_dump_json())
        return made(identity={"file": tmp_path / "none"}, **settings)

    return make


@pytest.mark.parametrize(
    ("last", "settings", "tier"),
    [
        ("", {}, "w1.00-d2"),
        ("w0.50-d2", {}, "w0.50-d2"),
        ("w0.25-d2", {}, "w1.00-d2"),
        ("", {"max_width": 0.5}, "w0.50-d2"),
    ],
)
def test_of_sets_a_board_wants_those_of_its_tier(member, last, settings, tier):
    """That of its last task, or the largest within its limits; a runtime is wanted beside them, by
    its own number.
    """
    board = member(last, **settings)
    board.receive(OperatorNotice(False, sets(7, "w1.00-d2", "w0.50-d2")))
    assert board.wanted == (sets(7, "w1.00-d2", "w0.50-d2"), blob_ref(tier.encode()))
    board.move("passed", 7, sets=True)
    assert (member().sets, member().record, board.wanted) == (
        "running 7 0 0",
        "running 0 0 0",
        None,
    )
    board.receive(OperatorNotice(False, release(6)))
    assert board.wanted == (release(6), blob_ref(b"it"))
    with pytest.raises(RefusedError, match="release 5 is older than release 7"):
        board.receive(OperatorNotice(False, sets(5, "w1.00-d2")))


@pytest.mark.parametrize(
    ("changes", "settings", "why"),
    [
        ({}, {"max_width": 0.25}, "tiers w1.00-d2 are beyond this board's limits"),
        ({"expires": 5}, {}, "it has expired; the operator can sign it again with a new rollout"),
    ],
)
def test_sets_that_do_not_fit_are_told(member, changes, settings, why):
    """And the record of runtimes stays as it is."""
    board = member(**settings)
    board.receive(OperatorNotice(False, sets(7, "w1.00-d2", **changes)))
    assert (board.sets, board.record, board.wanted) == (
        f"failed 7 0 0 {why}",
        "running 0 0 0",
        None,
    )


def test_a_board_without_the_memory_for_a_set_wants_its_plans_in_turn(member):
    """The server repeats what it announces, and the board goes on with the plan that it fetches."""
    refs = [blob_ref(name) for name in (b"w1.00-d2", b"fast", b"small")]
    planned = sets(7, "w1.00-d2", plans={"w1.00-d2": refs[1:]})
    board = member()
    board.receive(OperatorNotice(False, planned))
    assert board.wanted == (planned, refs[0])
    assert board.want_less_memory()
    board.receive(OperatorNotice(False, planned))
    assert board.wanted == (planned, refs[1])
    assert board.want_less_memory()
    assert board.wanted == (planned, refs[2])
    assert not board.want_less_memory()
    newer = sets(8, "w1.00-d2")
    board.receive(OperatorNotice(False, newer))
    assert board.wanted == (newer, refs[0])


def test_a_release_without_plans_reads_as_before_there_were_any():
    """Boards of earlier versions refuse keys that they do not know."""
    assert b"plans" not in sets(7, "w1.00-d2").to_bytes()
    with pytest.raises(ValueError, match="plans of tiers whose artifact sets are missing"):
        sets(7, "w1.00-d2", plans={"w0.50-d2": [blob_ref(b"a plan")]})


def test_without_an_operator_no_sets_are_taken(made):
    """Nobody has signed them."""
    board = made()
    board.receive(OperatorNotice(False, sets(7, "w1.00-d2")))
    assert (board.sets, board.wanted) == (None, None)


def test_a_release_is_a_runtime_or_sets():
    """One number, one thing."""
    with pytest.raises(ValueError, match="a runtime or artifact sets"):
        sets(7, "w1.00-d2", builds={board_kind(): blob_ref(b"it")})
    with pytest.raises(ValueError, match="a runtime or artifact sets"):
        sets(7)
