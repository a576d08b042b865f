"""Rounds that do not wait: nobody who is gone costs the others time, over a real broker."""

import contextlib
import re
import threading

import pytest

from broker_server.service import offers
from broker_server.store import Store, TaskPhase, queries
from broker_server.store.machine import RoundEvent
from fleet_protocol import control
from fleet_protocol.errors import RefusalReason
from fleet_protocol.messages import DeviceStatus
from tests.broker_server.peer import Peer, honest, profile
from tests.brokers import mosquitto_broker

DEVICES = 10
SLOWEST_SECONDS = 1.5


def after(seconds, script):
    """The script, later: the peer's own thread goes on meanwhile."""

    def delayed(peer, work):
        threading.Timer(seconds, script, (peer, work)).start()

    return delayed


def vanishes(peer, _work):
    """Takes the task, and its connection breaks."""
    peer.link._client._sock_close()
    peer.link._client.loop_stop()
    peer.link._client.reconnect_delay_set(600, 600)


def outcome(settings, run):
    store = Store(settings.store, read_only=True)
    with contextlib.closing(store):
        record = store.last_round(run)
        return record, {task.device: task for task in store.tasks(run, record.number, "train")}


@pytest.fixture
def mosquitto(tmp_path):
    with mosquitto_broker(tmp_path) as broker:
        yield broker.url


def test_a_round_with_a_tenth_of_its_devices_gone_closes_soon_after_the_slowest(
    mosquitto, config, running, fleet
):
    """One of ten pulls the plug: the round takes at most 1.5 times what the slowest that answered
    took.
    """
    settings = config(
        round={"min_devices": DEVICES, "deadline_seconds": 25}, evaluation={"data": None}
    )
    with contextlib.ExitStack() as stack:
        for index in range(1, DEVICES):
            script = after(SLOWEST_SECONDS * index / (DEVICES - 1), honest())
            stack.enter_context(Peer(fleet, f"d{index}", mosquitto, script))
        gone = Peer(fleet, "gone", mosquitto, vanishes)
        stack.callback(gone.link.close)
        gone.__enter__()
        server = running(settings, mosquitto)
        finished = server.wait()
    record, tasks = outcome(settings, finished.run)
    assert record.ending is RoundEvent.REST_AWAY
    slowest = max(
        task.timing.answered for task in tasks.values() if task.timing.answered is not None
    )
    assert slowest >= SLOWEST_SECONDS
    assert record.collect_seconds <= 1.5 * slowest
    assert tasks["gone"].phase is TaskPhase.MISSED
    assert tasks["gone"].timing.left is not None
    assert server.events_of(control.RoundClosed)[0].missing == ("gone",)


def test_who_fits_no_tier_is_named_while_the_others_wait(mosquitto, config, running, fleet):
    """Every view had said that nothing is wrong with it, for as long as the run waited."""
    settings = config(round={"min_devices": 2, "wait_seconds": 2}, evaluation={"data": None})
    small = Peer(fleet, "small", mosquitto, honest(), profile=profile(max_width=0.1))
    with small, Peer(fleet, "fits", mosquitto, honest()):
        finished = running(settings, mosquitto).wait()
    assert re.search(r"1 eligible device after .* small: .*none of the tiers", finished.error), (
        finished.error
    )
    with contextlib.closing(Store(settings.store)) as store:
        store.record_device(DeviceStatus(fleet=fleet, device="small", online=True, state="idle"))
        (seen,) = [view for view in queries.devices(store) if view.device.id == "small"]
        assert "none of the tiers" in seen.reason
        assert seen.remedy
        assert [line.device for line in store.events(finished.run) if line.kind == "unfit"] == [
            "small"
        ]


def halts(peer, _work):
    """Takes the task and answers nothing more, while its connection stays."""
    peer._stopping.set()


def test_who_is_connected_and_silent_is_away_and_who_answers_a_repeated_offer_is_not(
    mosquitto, config, running, fleet, monkeypatch
):
    """One is halted, which no broker sees: it is not waited for. One that works long says so when
    it is asked.
    """
    monkeypatch.setattr(offers, "SILENT_SECONDS", 1.5)
    keys = {
        "min_devices": 3,
        "quorum": 0.3,
        "grace": 0,
        "nudge_seconds": 60,
        "deadline_seconds": 60,
    }
    settings = config(round=keys, evaluation={"data": None})
    with (
        Peer(fleet, "halted", mosquitto, halts),
        Peer(fleet, "quick", mosquitto, honest()),
        Peer(fleet, "slow", mosquitto, after(5.0, honest())),
    ):
        finished = running(settings, mosquitto).wait()
        record, tasks = outcome(settings, finished.run)
    assert {name: task.phase for name, task in tasks.items()} == {
        "halted": TaskPhase.MISSED,
        "quick": TaskPhase.MERGED,
        "slow": TaskPhase.MERGED,
    }
    assert record.ending is RoundEvent.REST_AWAY
    assert tasks["halted"].timing.left < tasks["slow"].timing.answered
    with contextlib.closing(Store(settings.store, read_only=True)) as store:
        assert [entry.detail.split()[0] for entry in store.events() if entry.kind == "silent"] == [
            "halted"
        ]


def test_who_is_silent_is_not_asked_again_before_its_next_word(
    mosquitto, config, running, fleet, monkeypatch
):
    """A halted board costs its round the silence, and the rounds after that nothing."""
    monkeypatch.setattr(offers, "SILENT_SECONDS", 1.5)
    keys = {
        "rounds": 4,
        "min_devices": 1,
        "quorum": 0.3,
        "grace": 0,
        "nudge_seconds": 60,
        "deadline_seconds": 60,
    }
    settings = config(round=keys, evaluation={"data": None})

    def wakes(peer, work):
        if work.offer.round == 3:
            halted.say_hello()
        after(0.5 if work.offer.round == 3 else 0, honest())(peer, work)

    with Peer(fleet, "halted", mosquitto, halts) as halted, Peer(fleet, "quick", mosquitto, wakes):
        server = running(settings, mosquitto)
        finished = server.wait()
    with contextlib.closing(Store(settings.store, read_only=True)) as store:
        rounds = store.rounds(finished.run)
        asked = [
            {task.device for task in store.tasks(finished.run, number, "train")}
            for number in (1, 2, 3, 4)
        ]
    assert asked == [{"halted", "quick"}, {"quick"}, {"quick"}, {"halted", "quick"}]
    assert rounds[1].left_out.reasons["halted"].startswith("connected, but silent")


def first_round_only(peer, work):
    """By the second round the server knows of every device."""
    if work.offer.round == 1:
        honest()(peer, work)


def test_over_selection_does_not_wait_for_the_slowest(url, config, running, fleet):
    """Of three that are asked two are wanted: the one that does not answer is told so and costs
    nothing.
    """
    keys = {"rounds": 2, "min_devices": 2, "fraction": 0.5, "over_selection": 0.5}
    settings = config(round=keys, evaluation={"data": None})
    with (
        Peer(fleet, "a", url, honest()),
        Peer(fleet, "b", url, honest()),
        Peer(fleet, "slow", url, first_round_only) as slow,
    ):
        finished = running(settings, url).wait()
        record, tasks = outcome(settings, finished.run)
        assert (record.number, record.ending, record.wanted, len(tasks)) == (
            2,
            RoundEvent.ENOUGH,
            2,
            3,
        )
        assert tasks["slow"].phase is TaskPhase.MISSED
        slow.wait_for(lambda peer: peer.heard[-1].type == "cancel")
    assert record.collect_seconds < 10


def test_refusals_cost_the_others_nothing(url, config, running, fleet):
    """Seven of thirteen send labels that do not exist: the other six are the round."""
    settings = config(round={"min_devices": 13}, evaluation={"data": None})
    with contextlib.ExitStack() as stack:
        for index in range(13):
            script = honest(labels=(99,)) if index < 7 else honest()
            stack.enter_context(Peer(fleet, f"d{index:02d}", url, script))
        server = running(settings, url)
        finished = server.wait()
    assert finished.status == "finished", finished.error
    assert len(server.events_of(control.RoundClosed)[0].merged) == 6
    refused = server.events_of(control.UpdateRefused)
    assert {event.device for event in refused} == {f"d{index:02d}" for index in range(7)}
    assert {event.reason for event in refused} == {RefusalReason.BAD_LABELS}


def test_who_was_not_asked_is_remembered_with_the_reason(url, config, running, fleet):
    """One is too small for every tier, one is not drawn."""
    settings = config(
        round={"rounds": 2, "fraction": 0.5, "min_devices": 1}, evaluation={"data": None}
    )
    with (
        Peer(fleet, "a", url, honest()),
        Peer(fleet, "b", url, honest()),
        Peer(fleet, "tiny", url, honest(), profile=profile(free_ram_bytes=1)),
    ):
        finished = running(settings, url).wait()
    record, tasks = outcome(settings, finished.run)
    (other,) = {"a", "b"} - tasks.keys()
    reasons = dict(record.left_out.reasons)
    assert reasons.pop("tiny").startswith("none of the tiers")
    assert reasons == {other: "not drawn"}
