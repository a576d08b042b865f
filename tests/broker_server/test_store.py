"""The store: what is committed is found again, with its types."""

import contextlib
import os
import stat
import time
from dataclasses import replace

import pytest

from broker_server.store import (
    Outcome,
    RoundRecord,
    RunRecord,
    Screening,
    Store,
    TaskPhase,
    TaskRecord,
    VersionRecord,
)
from broker_server.store.machine import RoundEvent, RoundState, RoundTransitionError
from fleet_protocol.control import VersionEvaluation
from fleet_protocol.errors import RefusalReason, StorageError
from fleet_protocol.messages import BlobRef, DeviceProfile, DeviceStatus, Evaluation
from tests.broker_server.peer import profile
from tests.broker_server.test_folding import metrics

REF = BlobRef(digest="a" * 64, size=10, chunk_bytes=1024)


@pytest.fixture
def store(tmp_path):
    opened = Store(tmp_path / "s")
    yield opened
    opened.close()


def run_record(run="r1"):
    return RunRecord(run, "lab", "tiny", "{}", "running", None, time.time(), None, 0, 0)


def add_round(store, run="r1", number=1, devices=("a", "b")):
    record = RoundRecord(run, number, RoundState.PLANNED, 0, 1, None, 1.0, None, None, None, None)
    tasks = [
        TaskRecord(f"t{number}-{d}", run, number, d, "train", "w1.00-d1", "k", 0, REF, REF)
        for d in devices
    ]
    store.plan_round(record, tasks)
    return record, tasks


@pytest.fixture
def begun(store):
    store.add_run(run_record(), VersionRecord("r1", 0, 0, "b" * 64, None, None, 1.0, None))
    return store


def test_what_may_be_lost_waits_for_a_commit(store):
    """Presence, the log and counts are seen by the writer at once, and by others with the next
    commit or flush.
    """
    other = Store(store.folder, read_only=True)
    for state in ("idle", "training", "idle"):
        store.record_device(DeviceStatus(fleet="lab", device="a", online=True, state=state))
        store.record_device(DeviceProfile(fleet="lab", device="a", profile=profile()))
    store.log("said", "something")
    store.count_refusal("", "a", RefusalReason.MALFORMED, "server", 2)
    assert (other.devices(), other.events(), other.refusals()) == ([], [], [])
    store.flush()
    (device,) = other.devices()
    assert (device.online, device.state, device.profile) == (True, "idle", profile())
    assert [event.detail for event in other.events()] == ["something"]
    assert [refusal.count for refusal in other.refusals()] == [2]
    store.log("said", "at the end")
    store.close()
    assert [event.detail for event in other.events()] == ["something", "at the end"]
    other.close()


def test_an_answer_that_nobody_acknowledges_may_wait_for_a_commit(begun):
    """Later is with the next commit, of whatever it is, and nothing of an answer is lost by
    that.
    """
    other = Store(begun.folder, read_only=True)
    _, (first, second, *_) = add_round(begun)
    begun.receive([first.with_update("c" * 64, 77, metrics())], later=True)
    assert other.task(first.id) == first
    begun.receive([second.with_update("d" * 64, 78, metrics())])
    assert [(item.phase, item.update_size) for item in map(other.task, (first.id, second.id))] == [
        (TaskPhase.RECEIVED, 77),
        (TaskPhase.RECEIVED, 78),
    ]
    other.close()


MERGED = Outcome(TaskPhase.MERGED, Screening(norm=1.0, samples=10, declared=10))


def test_records_come_back_as_they_were(begun):
    """Rounds, tasks, versions and evaluations survive the trip through the database, types
    included.
    """
    record, tasks = add_round(begun)
    assert begun.last_round("r1") == record
    assert begun.tasks("r1", 1) == tasks
    own = Evaluation(examples=3, loss=0.5, accuracy=0.25)
    judged = VersionEvaluation(**own.model_dump(), tiers={"w0.50-d1": own})
    begun.receive([tasks[0].with_update("c" * 64, 77, metrics())])
    begun.add_version(VersionRecord("r1", 1, 1, "d" * 64, None, None, 2.0, None), {"t1-a": MERGED})
    begun.judge_version("r1", 1, statistics="e" * 64, evaluation=judged)
    version = begun.version("r1")
    assert (version.number, version.statistics_digest, version.evaluation) == (1, "e" * 64, judged)
    task = begun.task("t1-a")
    assert (task.phase, task.update_size, task.metrics) == (TaskPhase.MERGED, 77, metrics())


def test_the_newest_run_is_the_one_that_was_begun_last(begun):
    """One from when the server's clock was ahead would stay the newest until that day."""
    begun.add_run(
        replace(run_record("r2"), created_at=2e9),
        VersionRecord("r2", 0, 0, "b" * 64, None, None, 1.0, None),
    )
    begun.add_run(run_record("r3"), VersionRecord("r3", 0, 0, "b" * 64, None, None, 1.0, None))
    assert [run.id for run in begun.runs()] == ["r3", "r2", "r1"]
    assert begun.unfinished("lab").id == "r3"


def test_rounds_move_by_their_table(begun):
    """A commit of an impossible change is refused and nothing is written."""
    record, _ = add_round(begun)
    with pytest.raises(RoundTransitionError):
        begun.advance_round(record, RoundEvent.MERGED)
    assert begun.last_round("r1").state is RoundState.PLANNED
    record = begun.advance_round(record, RoundEvent.ANNOUNCE)
    assert record.state is RoundState.OPEN
    assert record.opened_at is not None


def test_what_has_not_come_when_a_round_ends_is_missed(begun):
    """In one commit with the change of state, so that no restart finds a task still open."""
    record, tasks = add_round(begun)
    begun.receive([tasks[0].with_update("c" * 64, 1, metrics())])
    for event in (RoundEvent.ANNOUNCE, RoundEvent.ANNOUNCED, RoundEvent.ENOUGH):
        record = begun.advance_round(record, event)
    assert [task.phase for task in begun.tasks("r1", 1)] == [TaskPhase.RECEIVED, TaskPhase.MISSED]


def test_a_device_keeps_its_profile_when_its_will_speaks(store):
    """The will has no profile; what the board is stays known."""
    store.record_device(DeviceProfile(fleet="lab", device="a", profile=profile()))
    store.record_device(DeviceStatus(fleet="lab", device="a", online=True, state="idle"))
    store.record_device(DeviceStatus(fleet="lab", device="a", online=False, state="gone"))
    (device,) = store.devices("lab")
    assert (device.online, device.state, device.profile) == (False, "gone", profile())
    assert device.last_seen_at >= device.first_seen_at
    assert store.devices("other") == []


def test_who_was_online_before_a_server_began_is_not(store):
    """It may have died meanwhile, and with it the broker that had its will; another fleet's are
    left alone.
    """
    for fleet in ("lab", "other"):
        store.record_device(DeviceStatus(fleet=fleet, device="a", online=True, state="idle"))
    assert [(item.online, item.state) for item in store.known_devices("lab")] == [(False, "idle")]
    assert [item.online for item in store.devices()] == [False, True]


def test_refusals_are_counted_by_reason(store):
    """The same refusal again adds to one row."""
    for times in (1, 2):
        store.count_refusal("r1", "a", RefusalReason.NOT_FINITE, "server", times)
    (counted,) = store.refusals()
    assert (counted.reason, counted.count) == ("not-finite", 3)


def test_a_line_of_the_log_is_one_line(store):
    """Whoever asks for something writes into it; who reads it has a terminal."""
    store.log("asked", "release \x1b[2J\n", device="a\nb")
    (line,) = store.events()
    assert (line.detail, line.device) == ("release  [2J ", "a b")


def test_totals_add_up(begun):
    """Byte counters are sums of what each server process counted."""
    for _ in range(2):
        begun.add_bytes("r1", wire=5, payload=3)
    assert (begun.run("r1").wire_bytes, begun.run("r1").payload_bytes) == (10, 6)


def test_a_file_that_is_no_database_is_an_error(tmp_path):
    """It says which file."""
    (tmp_path / "shoal.db").write_bytes(b"not a database" * 100)
    with pytest.raises(StorageError, match=r"shoal\.db"):
        Store(tmp_path)


def test_what_became_of_tasks_since_a_time_of_each_device(begun):
    """Of rounds planned later, none of them before the device's own time, nobody else's."""
    for number in (1, 2):
        record, _ = add_round(begun, number=number, devices=("a", "b", "c"))
    begun.settle(["t1-a", "t2-b"], TaskPhase.DECLINED, "failed: x")
    assert record.planned_at == 1.0
    since = {"a": 0.5, "b": 1.0, "c": 0.9}
    offered = TaskPhase.OFFERED
    assert sorted(begun.answered_since(since), key=str) == [
        ("a", TaskPhase.DECLINED, "failed: x"),
        ("a", offered, None),
        ("c", offered, None),
        ("c", offered, None),
    ]


@pytest.mark.parametrize(
    ("durable", "level"), [(True, 2), (False, 1)]
)  # FULL and NORMAL, as SQLite counts them
def test_commits_wait_for_the_disk_where_they_must(tmp_path, durable, level):
    """A server's do; a simulation's, which can compute all of it again, need not."""
    opened = Store(tmp_path / "s", durable=durable)
    with opened._engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == level
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    opened.close()


def test_a_store_is_for_its_owner_alone_wherever_it_lies(tmp_path):
    """The folder, the database and what SQLite keeps beside it; what a group was given it keeps,
    and nobody else.
    """
    before = os.umask(0o022)
    try:
        store = Store(tmp_path / "made" / "store")
    finally:
        os.umask(before)
    with contextlib.closing(store):
        store.log("said", "something")
        files = {
            path.name: stat.S_IMODE(path.stat().st_mode) for path in store.folder.glob("shoal.db*")
        }
        assert files == {"shoal.db": 0o600, "shoal.db-shm": 0o600, "shoal.db-wal": 0o600}
        assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    for before, after in ((0o640, 0o640), (0o644, 0o600)):
        store.path.chmod(before)
        Store(store.folder).close()
        assert stat.S_IMODE(store.path.stat().st_mode) == after
