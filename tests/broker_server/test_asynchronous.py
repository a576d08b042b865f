"""Rounds that do not wait: a version is made of the first updates, later ones count by how stale
they are.
"""

import contextlib
import json
import signal
import threading
import time
from collections import Counter

import numpy as np
import pytest

from broker_server.store import Store, TaskPhase, queries
from broker_server.store.explaining import explain_round
from fleet_protocol.control import FleetChanged, RoundClosed, RoundStarted
from fleet_protocol.errors import PlanError, RefusalReason
from fleet_protocol.messages import Cancel, Refuse, UploadAck, UploadRefused
from fleet_protocol.weights import encode_weights
from shoal.cli.views.explained_round import show_round
from tests.broker_server.peer import Peer, honest, profile, silent
from tests.broker_server.test_refused_runs import prepare
from tests.broker_server.test_resume import start_dying, weights_of
from tests.marking import mostly_slow

MOVES = {"a": 1.0, "b": 3.0, "c": 4.0}
KILLS = [
    ("", 0),  # not at all
    ("receive", 1),
    ("receive", 4),
    ("plan_round", 2),
    ("advance_round", 3),
    ("advance_round", 7),
    ("add_version", 1),
    ("add_version", 3),
    ("record_timings", 2),
]


def slow(delta):
    """Answers when it is offered its task for the third time: in the third round from the one it
    was asked in.
    """
    seen = Counter()

    def script(peer, work):
        seen[work.offer.task] += 1
        if seen[work.offer.task] >= 3:
            honest(delta)(peer, work)

    return script


@contextlib.contextmanager
def devices(fleet, url):
    with (
        Peer(fleet, "a", url, honest(MOVES["a"])) as a,
        Peer(fleet, "b", url, honest(MOVES["b"])) as b,
        Peer(fleet, "c", url, slow(MOVES["c"])) as c,
    ):
        yield a, b, c


def asynchronous(config, **round_keys):
    keys = {"rounds": 6, "min_devices": 3, "buffer": 2, "nudge_seconds": 60, **round_keys}
    return config(evaluation={"data": None}, round=keys)


def by_version(settings, run):
    """The tasks that each version is made of, with the version it began from, as the store
    tells.
    """
    with contextlib.closing(Store(settings.store, read_only=True)) as store:
        versions = store.versions(run)[1:]
        rounds = {record.number: record for record in store.rounds(run)}
        tasks = [task for number in rounds for task in store.tasks(run, number, "train")]
    merged = [task for task in tasks if task.phase is TaskPhase.MERGED]
    tasks_of_version = {
        record.round: [task for task in merged if task.screening.round == record.round]
        for record in versions
    }
    assert sum(map(len, tasks_of_version.values())) == len(merged)
    return tasks, [
        (rounds[number].version, merged_tasks) for number, merged_tasks in tasks_of_version.items()
    ]


def test_kills_name_methods_of_the_store():
    """A method that has another name now would kill no server, and only slow tests would see it."""
    assert [method for method, _ in KILLS if method and not hasattr(Store, method)] == []


@pytest.mark.parametrize(
    ("method", "call"), mostly_slow(KILLS, {("", 0), ("receive", 4)}.__contains__)
)
def test_every_acknowledged_update_counts_once_and_by_its_staleness(
    method, call, url, config, running, fleet, tmp_path
):
    """Whenever the server is killed: the weights are those that follow from who was merged when, by
    arithmetic.
    """
    settings = asynchronous(config)
    with devices(fleet, url) as peers:
        if method:
            assert start_dying(settings, url, method, call, tmp_path).wait(60) == -signal.SIGKILL
        finished = running(settings, url).wait()
        assert (finished.status, finished.rounds) == ("finished", 6), finished.error
        acknowledged = {message.task for peer in peers for message in peer.got(UploadAck)}
    tasks, versions = by_version(settings, finished.run)
    moved = 0.0
    stale = set()
    for version, merged_tasks in versions:
        weights = [(1 + version - task.version) ** -0.5 for task in merged_tasks]
        assert [task.screening.weight for task in merged_tasks] == weights
        moved += sum(
            w * MOVES[task.device] for w, task in zip(weights, merged_tasks, strict=True)
        ) / len(merged_tasks)
        stale |= {version - task.version for task in merged_tasks}
        assert len({task.device for task in merged_tasks}) == len(merged_tasks) >= 2
    assert 0 in stale
    assert max(stale) >= 2  # the slow device's update came two versions later, or after
    first = weights_of(settings, finished.run, 0)
    last = weights_of(settings, finished.run, 6)
    for name, value in first.items():
        np.testing.assert_allclose(last[name], value + moved, rtol=1e-5, atol=1e-5)
    merged = {task.id for _, merged_tasks in versions for task in merged_tasks}
    assert acknowledged <= merged
    assert all(task.phase is TaskPhase.MISSED for task in tasks if task.id not in merged)
    objects = [
        path.name for path in (settings.store / "updates" / "objects").rglob("*") if path.is_file()
    ]
    assert objects == []


@pytest.mark.parametrize("refused", [False, True])
def test_who_gives_up_a_task_of_an_earlier_round_ends_nothing(refused, url, config, running, fleet):
    """Neither by declining nor with an update that is refused: no round had that task any more, and
    the server died.
    """
    settings = asynchronous(config, rounds=3, buffer=1, quorum=0.3)
    held = {}
    waits = threading.Event()

    def hold(peer, work):
        held.setdefault(peer.device, work)

    def second(peer, work):
        assert work.offer.round == 1 or waits.wait(30)
        honest(1.0)(peer, work)

    half = Peer(fleet, "b", url, hold, profile=profile(max_width=0.5))
    with Peer(fleet, "a", url, hold), half as b, Peer(fleet, "c", url, second):
        server = running(settings, url)
        server.wait_event(RoundStarted, 2)
        work = held["b"]
        at_first = held["b"].offer
        if refused:
            b.send(
                work,
                encode_weights(
                    {n: np.full_like(v, np.nan) for n, v in work.weights.items()}, work.metadata()
                ),
            )
        else:
            failed = {"reason": RefusalReason.FAILED, "detail": "the loss is nan"}
            stamp = {
                "fleet": fleet,
                "device": "b",
                "task": at_first.task,
                "run": at_first.run,
                "round": 1,
            }
            b.link.publish(b.topics.reply("b"), Refuse(**stamp, **failed).to_bytes())
        with contextlib.closing(Store(settings.store, read_only=True)) as store:
            give_up = time.monotonic() + 60
            while (
                not (task := store.task(at_first.task)).phase.answered
                and time.monotonic() < give_up
            ):
                threading.Event().wait(0.05)
            assert task.phase is (TaskPhase.REFUSED if refused else TaskPhase.DECLINED)
            waits.set()
            finished = server.wait()
            assert (finished.status, finished.rounds) == ("finished", 3), finished.error
            needed = {version.digest for version in store.versions(finished.run)}
    kept = {
        path.name for path in (settings.store / "blobs" / "objects").rglob("*") if path.is_file()
    }
    assert kept == needed  # the slice that it trained is gone, too


def test_a_round_says_against_which_version_each_answered(url, config, running, fleet, capsys):
    """Who goes on is in no hurry to be told that it is over, and whoever trains is not asked for
    anything else.
    """
    settings = asynchronous(config)
    with devices(fleet, url) as (_, _, c):
        run = running(settings, url).wait().run
        assert len({offer.task for offer in c.offers}) < 6
        assert len(c.got(Cancel)) <= 1  # of the last round
    with contextlib.closing(Store(settings.store, read_only=True)) as store:
        rows = {number: explain_round(store, number, run) for number in range(1, 7)}
        listed = {
            view.round.number: view.phases.get("merged", 0) for view in queries.rounds(store, run)
        }
    # Those of a version are asked for in rounds before it, too.
    tasks, _ = by_version(settings, run)
    assert listed == Counter(
        task.screening.round for task in tasks if task.phase is TaskPhase.MERGED
    )
    asked = next(row for row in rows[1] if row.device == "c")
    counted = int(asked.why.rpartition(" ")[2])
    assert (asked.outcome, counted > 1) == ("merged", True)
    row = next(row for row in rows[counted] if row.device == "c")
    assert (row.version, row.weight) == (0, counted**-0.5)
    assert any(row.outcome == "not asked" and "at work" in row.why for row in rows[2])
    show_round(settings.store, counted, run, as_json=True)
    assert {
        device_row["device"]: device_row["version"]
        for device_row in json.loads(capsys.readouterr().out)
    }["c"] == 0
    show_round(settings.store, counted, run, as_json=False)
    assert f"{counted**-0.5:.4g}" in capsys.readouterr().out


def waits_for_devices(events):
    """Whether the server has begun to wait since its newest round was closed."""
    kinds = [type(event) for event in events]
    return FleetChanged in kinds[kinds.index(RoundClosed) :]


def test_an_update_that_comes_between_two_rounds_is_repeated_and_counts(
    url, config, running, fleet
):
    """While the server waits for devices nobody collects; it says nothing, instead of that the
    update is too late.
    """
    settings = asynchronous(config, rounds=2, min_devices=2, buffer=1)
    replies = []

    def leaving(peer, work):
        peer.script = silent
        peer.link.publish(peer.topics.status("a"), peer._status(online=False), retain=True)
        honest(1.0)(peer, work)

    with (
        Peer(fleet, "c", url, lambda _peer, work: replies.append(work)) as c,
        Peer(fleet, "a", url, leaving) as a,
    ):
        server = running(settings, url)
        server.wait_event(RoundClosed)
        a.wait_for(lambda peer: peer.got(UploadAck), 30)
        with server.changed:
            assert server.changed.wait_for(lambda: waits_for_devices(server.events), 30)
        honest(8.0)(c, replies[0])
        with pytest.raises(AssertionError):
            c.wait_for(lambda peer: peer.got(UploadRefused) or peer.got(Cancel), 1.5)
        a.say_hello()
        finished = server.wait()
    _, versions = by_version(settings, finished.run)
    assert [[task.device for task in merged_tasks] for _, merged_tasks in versions] == [
        ["a"],
        ["c"],
    ]


def test_nothing_is_stale_where_all_are_waited_for(url, config, running, fleet):
    """A buffer as large as the fleet makes the versions of rounds that wait, to the bit."""
    finals = []
    for keys in ({"buffer": 2}, {"buffer": None}):
        name = f"{fleet}{len(finals)}"
        settings = asynchronous(config, rounds=2, min_devices=2, **keys).model_copy(
            update={"fleet": name}
        )
        settings = settings.model_copy(update={"store": settings.store / name})
        with Peer(name, "a", url, honest(0.1)), Peer(name, "b", url, honest(0.3)):
            run = running(settings, url).wait().run
        finals.append(weights_of(settings, run, 2))
    assert all(np.array_equal(finals[0][name], finals[1][name]) for name in finals[0])


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        (
            {"strategy": {"name": "inclusivefl"}},
            "strategy inclusivefl .*adds the mean of the devices' changes",
        ),
        ({"strategy": {"name": "fedmedian"}}, "strategy fedmedian .*adds the mean"),
        (
            {"strategy": {"name": "fedrolex", "fedrolex": {"weighting": "width"}}},
            "strategy fedrolex .*adds the mean",
        ),
        ({"strategy": {"name": "whalefl"}}, "no device chooses its tier"),
    ],
)
def test_methods_that_need_updates_of_one_version_are_refused(config, tables, why):
    """When the run is planned, with what to do instead."""
    with pytest.raises(PlanError, match=rf"{why}.*; remove round.buffer, or use heterofl"):
        prepare(config, round={"buffer": 2}, **tables)


@pytest.mark.parametrize("name", ["heterofl", "fedavg", "fedrolex", "federated_dropout"])
def test_methods_that_average_what_has_changed_are_taken(config, name):
    assert prepare(config, round={"buffer": 2}, strategy={"name": name}).strategy.merge.deltas


def test_over_selection_has_no_place_beside_a_buffer(config):
    with pytest.raises(
        PlanError,
        match=r"round\.buffer and round\.over_selection are incompatible: .*; remove round.buffer, or remove round.over_selection",
    ):
        prepare(config, round={"buffer": 2, "over_selection": 0.5})
