"""Rollouts as a rule of values: who is asked when, when it stops, and what a folder keeps."""

import time
from contextlib import closing

import pytest

from broker_server.service.authority import enroll, found_fleet, renew, revoke, sign_release
from broker_server.service.new_fleet import NewFleet
from broker_server.service.rollout import (
    read_rollout,
    read_rollouts,
    start_rollout,
    steer_rollout,
    store_rollout,
    view_rollout,
)
from broker_server.service.rollout_state import Rollout
from broker_server.store import Store, TaskPhase
from broker_server.store.queries import find_run
from fleet_protocol.blobs import blob_ref
from fleet_protocol.errors import ConfigError, StorageError
from fleet_protocol.identity.enrolment import Papers
from fleet_protocol.identity.release import Release, board_kind
from fleet_protocol.messages import BlobRef, DeviceProfile, Profile
from tests.broker_server.peer import profile

RELEASE = Release(fleet="lab", number=7, builds={board_kind(): blob_ref(b"a runtime")})
NAMES = [f"pi-{number}" for number in range(20)]


def rollout(**changes):
    values = {"stages": (0.05, 0.25, 1.0), "within_seconds": 100.0, "most_failed": 0.1}
    return Rollout.model_validate({"release": RELEASE, "signed": "00", **values, **changes})


def test_stages_wait_for_those_before_and_take_later_boards():
    """One of twenty, then five, then all, then who comes later; each is asked once."""
    records = dict.fromkeys(NAMES, "running 0 0 0")
    going = rollout()
    asked = []
    for at in range(5):
        going = going.advance(records, records, float(at))
        assert going.advance(records, records, at + 0.5) == going  # nobody has ended
        asked.append(len(going.asked))
        records |= dict.fromkeys(going.asked, "running 7 0 0")
        if at == 2:
            records["pi-new"] = "failed 3 0 0 once"
    assert asked == [1, 5, 20, 21, 21]
    assert not going.stopped
    assert set(going.outcomes(records, 9.0).values()) == {"running"}


def test_only_boards_that_are_there_are_asked():
    """The others are when they come."""
    records = dict.fromkeys(NAMES, "running 0 0 0")
    assert rollout(stages=(1.0,)).advance(records, ["pi-3", "pi-x"], 0.0).asked == {"pi-3": 0.0}


def test_a_share_is_of_whole_boards():
    """Seven of a hundred, though 0.07 * 100 is a little more as floats."""
    records = {f"pi-{number}": "running 0 0 0" for number in range(100)}
    for percent in (7, 14, 28, 29):
        assert (
            len(rollout(stages=(percent / 100, 1.0)).advance(records, records, 0.0).asked)
            == percent
        )


def test_more_tiers_than_a_release_takes_are_refused(tmp_path):
    """As an error that says how many do."""
    found_fleet(tmp_path, NewFleet(fleet="lab", host="localhost"))
    with pytest.raises(
        ConfigError, match="17 tiers do not fit into one release; roll out at most 16"
    ):
        sign_release(tmp_path, {}, {f"w{number}": [blob_ref(b"x")] for number in range(17)}, 1, 0)
    plans = [blob_ref(b"x")] * 34
    with pytest.raises(ConfigError, match=r"33 plans do not fit .* have at most 32"):
        sign_release(tmp_path, {}, {"w1": plans}, 1, 0)


def test_the_largest_release_fits_into_what_a_board_reads(tmp_path):
    """All tiers and plans that it may have, of large files."""
    found_fleet(tmp_path, NewFleet(fleet="lab", host="localhost"))
    ref = BlobRef(digest=blob_ref(b"x").digest, size=2**30, chunk_bytes=2**20)
    manifests = {f"w1.00-d10-t{number:02}": [ref] * 3 for number in range(16)}
    _, signed = sign_release(tmp_path, {}, manifests, 90, 0)
    Papers(revoked="00", release=signed)


@pytest.mark.parametrize(
    ("record", "later", "said"),
    [
        (
            "failed 7 0 0 its self-test failed: no numpy",
            1.0,
            "1 of 1 boards: NAME failed: its self-test failed: no numpy",
        ),
        ("running 0 0 0", 101.0, "1 of 1 boards: NAME failed: it did not reconnect in time"),
        ("trial 7 0 1", 101.0, "1 of 1 boards: NAME failed: it did not reconnect in time"),
        ("trial 7 0 1", 99.0, ""),
        ("failed 6 0 0 long ago", 99.0, ""),
    ],
)
def test_it_stops_where_more_fail_than_may(record, later, said):
    """With the first reason; once stopped it asks nobody, whatever comes."""
    records = dict.fromkeys(NAMES, "running 0 0 0")
    first = rollout().advance(records, records, 0.0)
    (name,) = first.asked
    stopped = first.advance(records | {name: record}, records, later)
    assert stopped.stopped == said.replace("NAME", name)
    if said:
        late = stopped.advance(records | {name: "running 7 0 0"}, records, later)
        assert (late.stopped, late.asked) == (stopped.stopped, stopped.asked)


def test_some_may_fail():
    """Two of twenty of a tenth."""
    records = dict.fromkeys(NAMES, "running 7 0 0") | dict.fromkeys(NAMES[:2], "failed 7 0 0 x")
    whole = rollout(stages=(1.0,), asked=dict.fromkeys(NAMES, 0.0))
    assert not whole.advance(records, records, 1.0).stopped
    assert whole.advance(records | {NAMES[2]: "failed 7 0 0 x"}, records, 1.0).stopped.startswith(
        "3 of 20 boards"
    )


def test_what_became_of_boards_stays_when_they_take_the_next_release(tmp_path):
    """They forget the one before; who had not come back by then, and was not late, is still on the
    way.
    """
    records = dict.fromkeys(NAMES[:4], "running 0 0 0")
    asked = rollout(stages=(1.0,), most_failed=1.0).advance(records, records, time.time())
    records |= {NAMES[0]: "running 7 0 0", NAMES[1]: "failed 7 0 0 no numpy"}
    over = asked.advance(records, records, time.time()).model_copy(update={"ended": time.time()})
    with closing(Store(tmp_path / "store")) as store:
        for name, record in zip(
            NAMES[1:6], ["running 8 7 0"] * 3 + ["trial 7 0 1"] * 2, strict=True
        ):
            store.record_device(
                DeviceProfile(fleet="lab", device=name, profile=profile(release=record))
            )
        view = view_rollout(over, store)
        going = view_rollout(asked, store)
        assert (view.state, view.verbs, view.versions) == (
            "replaced",
            (),
            dict.fromkeys(NAMES[1:4], "0"),
        )
        assert view.boards == {
            "pi-0": "running",
            "pi-1": "failed: no numpy",
            "pi-2": "asked",
            "pi-3": "asked",
        }
        assert (going.state, going.verbs) == ("going", ("pause", "stop"))
        assert [going.boards[name] for name in NAMES[1:6]] == ["asked"] * 3 + ["not asked"] * 2
        assert read_rollouts(store) == []
    late = over.model_copy(update={"ended": time.time() + 101.0})
    assert late.outcomes({}, 0.0)["pi-2"] == "failed: it did not reconnect in time"


def test_a_paused_rollout_asks_nobody_until_it_goes_on(tmp_path):
    """Those that were asked go on meanwhile, and their failures stop it; what is stopped stays
    so.
    """
    records = dict.fromkeys(NAMES, "running 0 0 0")
    going = rollout().advance(records, records, 0.0)
    (name,) = going.asked
    for state, may in {"going": "pause stop", "paused": "resume stop", "stopped": ""}.items():
        for verb in ("pause", "resume", "stop"):
            (tmp_path / "registry.json").write_text("{}")
            changes = {"going": {}, "paused": {"paused": True}, "stopped": {"stopped": "x"}}[state]
            store_rollout(tmp_path, lambda changes=changes: going.model_copy(update=changes))
            if verb in may:
                after = {"pause": "paused", "resume": "going", "stop": "stopped"}[verb]
                assert steer_rollout(tmp_path, verb).state == after
            else:
                with pytest.raises(
                    ConfigError, match=f"release 7 is {state}.*nothing is left to {verb}"
                ):
                    steer_rollout(tmp_path, verb)
    paused = going.model_copy(update={"paused": True})
    runs = records | {name: "running 7 0 0"}
    assert list(paused.advance(runs, records, 1.0).asked) == [name]
    assert len(going.advance(runs, records, 1.0).asked) == 5
    stopped = paused.advance(records | {name: "failed 7 0 0 x"}, records, 1.0)
    assert (stopped.state, stopped.stopped) == ("stopped", f"1 of 1 boards: {name} failed: x")


def test_a_board_that_fails_in_a_round_after_it_has_failed():
    """By a refusal of either side, however well it took the release; not because it was busy."""
    records = dict.fromkeys(NAMES, "running 0 0 0")
    first = rollout().advance(records, records, 0.0)
    (name,) = first.asked
    records[name] = "running 7 0 0"
    for phase, why in (
        (TaskPhase.DECLINED, "busy: on battery"),
        (TaskPhase.REFUSED, "too-far: x"),
        (TaskPhase.MISSED, None),
    ):
        excused = first.with_answers(records, 0.5, [(name, phase, why)])
        assert len(excused.advance(records, records, 1.0).asked) == 5
    for phase in (TaskPhase.DECLINED, TaskPhase.REFUSED):
        failing = first.with_answers(
            records, 0.5, [(name, TaskPhase.MERGED, None), (name, phase, "failed: the loss is nan")]
        )
        said = f"1 of 1 boards: {name} failed: in a round: failed: the loss is nan"
        assert failing.with_answers(records, 0.6, []).advance(records, records, 1.0).stopped == said


def test_the_gate_holds_the_next_stage_until_tasks_are_finished():
    """Whoever has not finished enough in time has failed."""
    records = dict.fromkeys(NAMES, "running 0 0 0")
    first = rollout(gate=2).advance(records, records, 0.0)
    (name,) = first.asked
    records[name] = "running 7 0 0"
    assert first.outcomes(records, 1.0) == {name: "proving"}
    once = first.with_answers(records, 0.5, [(name, TaskPhase.MERGED, None)])
    assert once.advance(records, records, 99.0).asked == first.asked
    assert once.judged == {}
    assert (
        once.advance(records, records, 101.0).stopped
        == f"1 of 1 boards: {name} failed: it did not reconnect in time"
    )
    twice = first.with_answers(
        records, 0.5, [(name, TaskPhase.MERGED, None), (name, TaskPhase.LEFT_OUT, None)]
    )
    assert twice.outcomes(records, 101.0) == {name: "running"}
    assert len(twice.advance(records, records, 1.0).asked) == 5


def test_a_folder_keeps_the_newest_with_its_files(tmp_path):
    """Numbers grow, also where a rollout is lost with a backup; without the operator's key nothing
    changes.
    """
    folder = tmp_path / "lab"
    found_fleet(folder, NewFleet("lab", "h"))
    with pytest.raises(ConfigError, match="shoal rollout start"):
        read_rollout(folder)
    how = {"stages": (1.0,), "within_seconds": 60.0, "most_failed": 0.0}
    first = start_rollout(folder, {"a": b"one", "b": b"two"}, 90, **how)
    second = start_rollout(folder, {"a": b"three"}, 90, **how)
    with closing(Store(folder / "store")) as store:
        kept = [view.rollout for view in read_rollouts(store)]
        assert [found.model_copy(update={"ended": 0.0}) for found in kept] == [second, first]
        (folder / "rollouts" / "1.json").write_text("{}")
        with pytest.raises(StorageError, match="remove its rollouts folder"):
            read_rollouts(store)
    assert second.release.number > first.release.number > 1_700_000_000
    assert read_rollout(folder) == second
    assert len(list((folder / "releases/objects").glob("*/*"))) == 1
    stopped = steer_rollout(folder, "stop")
    assert (
        read_rollout(folder)
        == stopped
        == second.model_copy(update={"stopped": "the operator stopped it"})
    )
    with pytest.raises(ConfigError, match="the operator stopped it; nothing is left to stop"):
        steer_rollout(folder, "stop")
    (folder / "operator.pem").unlink()
    with pytest.raises(ConfigError, match="operator's key"):
        start_rollout(folder, {"a": b"four"}, 90, **how)
    assert read_rollout(folder) == stopped
    assert len(list((folder / "releases/objects").glob("*/*"))) == 1


def test_a_folder_of_no_fleet_is_said_to_be_none(tmp_path):
    """By each command that changes one, and not that a key in it cannot be read; so are a store and
    runs.
    """
    for change in (
        lambda: enroll(tmp_path, "pi"),
        lambda: renew(tmp_path, (), days=1),
        lambda: revoke(tmp_path, "pi"),
    ):
        with pytest.raises(ConfigError, match="is not the folder of a fleet"):
            change()
    with (
        closing(Store(tmp_path / "store")) as store,
        pytest.raises(ConfigError, match="no runs yet; `shoal run` starts one"),
    ):
        find_run(store)


@pytest.mark.parametrize(
    "text", ["", "running", "trial x 0 0", "running 1 0 0\nfailed", "trial 99999999999999999 0 0"]
)
def test_what_a_board_says_of_its_releases_is_checked_where_it_comes(text):
    """A server takes it apart."""
    with pytest.raises(ValueError, match="release"):
        Profile.model_validate({"release": text})
