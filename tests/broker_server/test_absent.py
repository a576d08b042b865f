"""Devices that are away, cannot, or may not, and a server that starts again: what holds nobody up
and loses nothing.
"""

import contextlib
import signal
import threading

import numpy as np
import pytest

from broker_server.store import Store, TaskPhase
from broker_server.store.machine import RoundState
from fleet_protocol.control import RoundClosed
from fleet_protocol.digests import blob_path
from fleet_protocol.errors import RefusalReason
from fleet_protocol.mapped_tensors import open_tensors
from fleet_protocol.messages import Cancel, UploadAck
from fleet_protocol.weights import encode_weights
from tests.broker_server.peer import Peer, honest, profile, silent
from tests.broker_server.test_asynchronous import asynchronous
from tests.broker_server.test_resume import start_dying

UNJUDGED = {"data": None}


@contextlib.contextmanager
def stored(settings):
    with contextlib.closing(Store(settings.store, read_only=True)) as store:
        yield store


def leave(peer):
    """As a board whose power is cut."""
    peer.script = silent
    peer.link.publish(peer.topics.status(peer.device), peer._status(online=False), retain=True)


def leaving(peer, work):
    leave(peer)
    honest(1.0)(peer, work)


@pytest.fixture
def between_rounds(url, config, running, fleet):
    """A run without its server, which was stopped when c's update had come between two rounds; and
    c and a.
    """
    settings = asynchronous(
        config, rounds=2, min_devices=2, buffer=1, deadline_seconds=6, retries=3
    )
    told = []
    with (
        Peer(fleet, "c", url, lambda _peer, work: told.append(work)) as c,
        Peer(fleet, "a", url, leaving) as a,
    ):
        server = running(settings, url)
        server.wait_event(RoundClosed)
        a.wait_for(lambda peer: peer.got(UploadAck), 30)
        honest(8.0)(c, told[0])
        c.wait_for(lambda peer: peer.got(UploadAck), 30)
        server.__exit__()
        with stored(settings) as store:
            (waiting,) = (task for task in store.tasks(store.runs()[0].id, 1) if task.device == "c")
        assert waiting.phase is TaskPhase.RECEIVED
        yield settings, a, c, waiting


def test_an_update_that_came_between_two_rounds_outlives_the_server(between_rounds, url, running):
    """It was acknowledged, so it counts; its file had been deleted at the start, and the run
    failed.
    """
    settings, a, c, waiting = between_rounds
    a.script = c.script = honest(1.0)
    a.say_hello()
    finished = running(settings, url).wait()
    assert finished.status == "finished", finished.error
    with stored(settings) as store:
        assert store.task(waiting.id).phase is TaskPhase.MERGED


def test_a_damaged_update_of_an_earlier_round_costs_one_round(between_rounds, url, running):
    """It had every later round abandoned, until the run failed."""
    settings, a, c, waiting = between_rounds
    for path in (settings.store / "updates").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    a.script = c.script = honest(1.0)
    a.say_hello()
    finished = running(settings, url).wait()
    assert finished.status == "finished", finished.error
    with stored(settings) as store:
        assert store.task(waiting.id).phase is TaskPhase.MISSED
        assert store.task(waiting.id).detail
        states = [item.state for item in store.rounds(finished.run)]
    assert states.count(RoundState.ABANDONED) <= 1


def test_boards_that_left_take_no_places_of_those_at_work(url, config, running, fleet):
    """With a buffer and half of the fleet at work: the two that were asked first had kept both
    places for good.
    """
    settings = asynchronous(
        config, rounds=2, min_devices=2, fraction=0.5, deadline_seconds=3, retries=3
    )
    left = []
    lock = threading.Lock()

    def first_two_leave(peer, work):
        with lock:
            gone = len(left) < 2
            left.extend([peer.device] * gone)
        (leave(peer) if gone else honest(1.0)(peer, work))

    with contextlib.ExitStack() as stack:
        for name in "abcd":
            stack.enter_context(Peer(fleet, name, url, first_two_leave))
        finished = running(settings, url).wait()
    assert finished.status == "finished", finished.error
    with stored(settings) as store:
        closed = [item for item in store.rounds(finished.run) if item.state is RoundState.CLOSED]
        asked = {task.device for item in closed for task in store.tasks(finished.run, item.number)}
    assert closed
    assert not asked & {*left}


def test_who_is_at_work_when_a_run_ends_is_told(url, config, running, fleet):
    """By `patience` too; the board had trained on to its deadline for nothing."""
    settings = asynchronous(config, rounds=9)
    patience = {"patience": 1, "statistics": "server-batch", "data": config().evaluation.data}
    settings = settings.model_copy(update={"evaluation": config(evaluation=patience).evaluation})
    with (
        Peer(fleet, "a", url, honest(0.0)),
        Peer(fleet, "b", url, honest(0.0)),
        Peer(fleet, "c", url, silent) as c,
    ):
        finished = running(settings, url).wait()
        assert finished.early
        c.wait_for(lambda peer: peer.got(Cancel), 20)


def test_a_round_whose_version_was_judged_is_closed_before_the_run_ends(
    url, config, running, fleet, tmp_path
):
    """A server killed between the two commits left a round that was `merging` for ever in a
    finished run.
    """
    settings = config(
        round={"rounds": 6, "min_devices": 2},
        evaluation={"patience": 1, "statistics": "server-batch"},
    )
    with Peer(fleet, "a", url, honest(0.0)), Peer(fleet, "b", url, honest(0.0)):
        assert start_dying(settings, url, "judge_version", 4, tmp_path).wait(60) == -signal.SIGKILL
        server = running(settings, url)
        finished = server.wait()
    assert finished.early
    assert [event.round for event in server.events_of(RoundClosed)] == [2]
    with stored(settings) as store:
        assert {item.state for item in store.rounds(finished.run)} == {RoundState.CLOSED}


def test_boards_that_cannot_work_are_not_asked_for_statistics(url, config, running, fleet):
    """Three of five are on battery: as they declined, nothing was ever judged."""
    asked = []

    def paused(peer, work):
        asked.append(work.offer.routine)
        peer.refuse(work, RefusalReason.BUSY, "paused: on battery")

    with contextlib.ExitStack() as stack:
        for name in "ab":
            stack.enter_context(Peer(fleet, name, url, honest(1.0)))
        for name in ("p1", "p2", "p3"):
            stack.enter_context(
                Peer(fleet, name, url, paused, profile=profile(unable="paused: on battery"))
            )
        finished = running(config(round={"min_devices": 2}), url).wait()
    assert finished.evaluation is not None
    assert not asked


def test_statistics_of_a_board_whose_updates_are_refused_are_not_taken(url, config, running, fleet):
    """Neither in the round of the refusal nor in quarantine."""

    def bad(peer, work):
        tensors = {name: value * np.float32(1e6) for name, value in work.weights.items()}
        if work.offer.routine == "statistics":
            tensors = work.statistics(1000.0, 1e6)
        peer.send(work, encode_weights(tensors, work.metadata()))

    settings = config(
        round={"rounds": 3, "min_devices": 4},
        robust={"norm_bound": 5, "quarantine_after": 2, "quarantine_rounds": 9},
    )
    with contextlib.ExitStack() as stack:
        for name in "abc":
            stack.enter_context(Peer(fleet, name, url, honest(1.0)))
        stack.enter_context(Peer(fleet, "bad", url, bad))
        finished = running(settings, url).wait()
    with stored(settings) as store:
        for version in store.versions(finished.run)[1:]:
            path = settings.store / "blobs" / "objects" / blob_path(version.statistics_digest)
            assert not open_tensors(path)["stat.norm.mean"].any()


LIES = {
    "huge": (1000.0, 1e6, 2, "too-far"),
    "negative": (0.0, -1.0, 2, "malformed"),
    "of-all-batches": (3.0, 3.0, 2**53, ""),
}


@pytest.mark.attack(
    "member",
    "Trains honestly, but sends batch norm statistics that are huge or negative, or claims that "
    "they cover 2^53 batches",
    "refused with the reason and the device's name, or counted as ten times the usual number of "
    "batches; the server still evaluates versions",
    "2026-11-29",
)
@pytest.mark.parametrize(("mean", "variance", "batches", "reason"), LIES.values(), ids=LIES)
def test_no_device_makes_every_version_look_useless(
    mean, variance, batches, reason, url, config, running, fleet
):
    """One of four could have chosen the statistics with which each version was evaluated."""

    def lying(peer, work):
        if work.offer.routine != "statistics":
            honest(1.0)(peer, work)
            return
        data = encode_weights(work.statistics(mean, variance), work.metadata())
        peer.send(work, data, batches=batches)

    settings = config(
        round={"rounds": 1, "min_devices": 4}, robust={"norm_bound": 5, "weight_bound": 10}
    )
    with contextlib.ExitStack() as stack:
        for name in "abc":
            stack.enter_context(Peer(fleet, name, url, honest(1.0)))
        stack.enter_context(Peer(fleet, "liar", url, lying))
        finished = running(settings, url).wait()
    assert finished.evaluation is not None
    with stored(settings) as store:
        refused = [(line.device, line.reason) for line in store.refusals()]
        version = store.versions(finished.run)[-1]
    assert refused == ([("liar", reason)] if reason else [])
    path = settings.store / "blobs" / "objects" / blob_path(version.statistics_digest)
    statistics = open_tensors(path)
    share = 0.0 if reason else 20 / 26
    assert np.allclose(statistics["stat.norm.mean"], share * mean)
