"""A server that is killed goes on with the round it was in, and a broker that dies loses
nothing.
"""

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from broker_server.store import Store, TaskPhase
from broker_server.store.machine import RoundState
from fleet_protocol import control
from fleet_protocol.digests import blob_path
from fleet_protocol.errors import DataError
from fleet_protocol.mapped_tensors import open_tensors
from fleet_protocol.messages import Offer
from fleet_protocol.weights import encode_weights
from tests.broker_server.peer import Peer, honest, profile
from tests.brokers import embedded_broker, mosquitto_broker

ROOT = Path(__file__).parents[2]


def start_dying(config, url, method, call, tmp_path, *how):
    path = tmp_path / "config.json"
    path.write_text(config.model_dump_json())
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.broker_server.dying_server",
            str(path),
            url,
            method,
            str(call),
            *how,
        ],
        cwd=ROOT,
    )


def weights_of(config, run, number):
    store = Store(config.store, read_only=True)
    digest = store.version(run, number).digest
    store.close()
    return open_tensors(config.store / "blobs" / "objects" / blob_path(digest))


def expected(config):
    """Two rounds by arithmetic: the wide device adds 1 and the narrow one 3, each to what it
    holds.
    """
    start = weights_of(config, config_run(config), 0)
    after = {}
    for name, value in start.items():
        shared = np.zeros(value.shape, bool)
        if name in {"hidden.weight", "hidden.bias"}:
            shared[:4] = True
        elif name == "head.weight":
            shared[:, :4] = True
        else:
            shared[:] = True
        after[name] = value + 2 * np.where(shared, 2.0, 1.0)
    return after


def cut_the_power(config):
    """Empty every blob that no version names: what was sent of one is not synced, so a power cut
    may leave that.
    """
    with contextlib.closing(Store(config.store, read_only=True)) as store:
        versions = store.versions(store.runs()[0].id)
    names = {
        name
        for version in versions
        for name in (version.digest, version.state_digest, version.statistics_digest)
        if name
    }
    objects = config.store / "blobs" / "objects"
    for path in {*objects.glob("*/*")} - {objects / blob_path(name) for name in names}:
        path.write_bytes(b"")


def config_run(config):
    store = Store(config.store, read_only=True)
    run = store.runs()[0].id
    store.close()
    return run


# After which commit the server dies, and the state in which its successor finds the round.
DEATHS = [
    ("plan_round", 1, RoundState.PLANNED),
    ("advance_round", 1, RoundState.OPEN),
    ("advance_round", 2, RoundState.COLLECTING),
    ("receive", 1, RoundState.COLLECTING),
    ("receive", 2, RoundState.COLLECTING),
    ("advance_round", 3, RoundState.MERGING),
    ("add_version", 1, RoundState.MERGING),
    ("add_tasks", 1, RoundState.MERGING),
    ("receive", 3, RoundState.MERGING),
    ("judge_version", 1, RoundState.MERGING),
    ("advance_round", 4, RoundState.CLOSED),
]


QUICK = {("receive", 1), ("add_version", 1)}  # the others with the slow tests


@pytest.mark.parametrize(
    ("method", "call", "state"),
    [
        pytest.param(*death, marks=() if death[:2] in QUICK else pytest.mark.slow)
        for death in DEATHS
    ],
    ids=[f"{m}-{c}" for m, c, _ in DEATHS],
)
def test_a_killed_server_goes_on_where_it_was(
    method, call, state, url, config, running, fleet, tmp_path
):
    """Killed after any commit of a round, also by a power cut, the next server ends with the same
    global versions.
    """
    settings = config(round={"rounds": 2, "min_devices": 2})
    with (
        Peer(fleet, "narrow", url, honest(3.0), profile=profile(max_width=0.5)),
        Peer(fleet, "wide", url, honest(1.0)),
    ):
        process = start_dying(settings, url, method, call, tmp_path)
        assert process.wait(60) == -signal.SIGKILL
        cut_the_power(settings)
        store = Store(settings.store, read_only=True)
        last_round = store.last_round(config_run(settings))
        planned = store.tasks(last_round.run, 1)
        store.close()
        assert last_round.state is state
        server = running(settings, url)
        finished = server.wait()
    assert finished.status == "finished", finished.error
    assert finished.run == last_round.run
    assert finished.rounds == 2
    store = Store(settings.store, read_only=True)
    tasks = store.tasks(last_round.run, 1)
    assert len(store.rounds(last_round.run)) == 2
    assert len(store.versions(last_round.run)) == 3
    store.close()
    assert {task.id for task in planned} <= {task.id for task in tasks}
    assert [task.phase for task in tasks if task.kind == "train"] == [TaskPhase.MERGED] * 2
    for name, value in weights_of(settings, last_round.run, 2).items():
        np.testing.assert_allclose(value, expected(settings)[name], rtol=1e-6, atol=1e-6)
    assert finished.evaluation is not None


# After which commit of the second round the server dies while the first version is still being
# judged.
BESIDE = [
    ("advance_round", 4, 1, RoundState.CLOSED),
    ("plan_round", 2, 2, RoundState.PLANNED),
    ("advance_round", 5, 2, RoundState.OPEN),
    ("advance_round", 6, 2, RoundState.COLLECTING),
    ("receive", 5, 2, RoundState.COLLECTING),
    ("advance_round", 7, 2, RoundState.MERGING),
    ("add_version", 2, 2, RoundState.MERGING),
]


@pytest.mark.parametrize(
    ("method", "call", "number", "state"),
    [
        pytest.param(*death, marks=() if death[0] == "receive" else pytest.mark.slow)
        for death in BESIDE
    ],
    ids=[f"{method}-{call}" for method, call, *_ in BESIDE],
)
def test_a_version_that_was_being_judged_is_judged_again_and_once(
    method, call, number, state, url, config, running, fleet, tmp_path
):
    """A server killed in the next round leaves the judgement open; its successor makes it, under
    its own round.
    """
    settings = config(round={"rounds": 2, "min_devices": 2})
    with (
        Peer(fleet, "narrow", url, honest(3.0), profile=profile(max_width=0.5)),
        Peer(fleet, "wide", url, honest(1.0)),
    ):
        assert (
            start_dying(settings, url, method, call, tmp_path, "stuck").wait(60) == -signal.SIGKILL
        )
        store = Store(settings.store, read_only=True)
        last_round = store.last_round(config_run(settings))
        before = store.version(config_run(settings), 1)
        store.close()
        assert (last_round.number, last_round.state) == (number, state)
        assert before.evaluation is None
        server = running(settings, url)
        finished = server.wait()
    assert finished.status == "finished", finished.error
    with contextlib.closing(Store(settings.store, read_only=True)) as store:
        rounds = store.rounds(last_round.run)
        versions = store.versions(last_round.run)
        judgements = [
            event for event in store.events(run=last_round.run) if event.kind == "round-judged"
        ]
    assert [record.evaluation for record in rounds] == [
        record.evaluation for record in versions[1:]
    ]
    assert all(record.evaluation is not None for record in rounds), [
        record.note for record in rounds
    ]
    assert [event.round for event in judgements] == [1]
    assert [event.round for event in server.events_of(control.RoundJudged)] == [1]
    for name, value in weights_of(settings, last_round.run, 2).items():
        np.testing.assert_allclose(value, expected(settings)[name], rtol=1e-6, atol=1e-6)


def test_a_killed_server_does_not_judge_a_recorded_version_again(
    url, config, running, fleet, tmp_path
):
    """Killed right after the commit of the judgement, with the next round under way."""
    settings = config(round={"rounds": 2, "min_devices": 2})
    with Peer(fleet, "a", url, honest(3.0)), Peer(fleet, "b", url, honest(1.0)):
        assert start_dying(settings, url, "judge_closed", 1, tmp_path).wait(60) == -signal.SIGKILL
        server = running(settings, url)
        assert server.wait().status == "finished"
    assert not server.events_of(control.RoundJudged)


@pytest.mark.parametrize(
    ("method", "call"),
    [pytest.param("advance_round", 3, marks=pytest.mark.slow), ("add_version", 1)],
)
def test_the_last_round_of_a_killed_server_is_closed_and_judged(
    method, call, url, config, running, fleet, tmp_path
):
    """Its updates are in, or even its version is made: it is judged with the statistics of all who
    took part.
    """
    settings = config(round={"min_devices": 2})
    with (
        Peer(fleet, "narrow", url, honest(3.0), profile=profile(max_width=0.5)),
        Peer(fleet, "wide", url, honest(1.0)),
    ):
        assert start_dying(settings, url, method, call, tmp_path).wait(60) == -signal.SIGKILL
        finished = running(settings, url).wait()
    assert finished.status == "finished", finished.error
    store = Store(settings.store, read_only=True)
    record = store.last_round(finished.run)
    tasks = store.tasks(finished.run, 1, "statistics")
    store.close()
    assert record.state is RoundState.CLOSED
    assert record.note is None
    assert record.evaluation == finished.evaluation is not None
    assert {task.device for task in tasks} == {"narrow", "wide"}


def test_an_interrupted_run_gives_the_same_bits(url, config, running, fleet, tmp_path):
    """A run that was killed between two updates merges to exactly the weights of one that was
    not.
    """

    def awkward(seed):
        def script(peer, work):
            if work.offer.routine == "statistics":
                return honest()(peer, work)
            rng = np.random.default_rng(seed)
            sorted_tensors = sorted(
                work.weights.items()
            )  # the library returns tensors in no particular order
            tensors = {
                name: value + rng.standard_normal(value.shape, np.float32)
                for name, value in sorted_tensors
            }
            return peer.send(work, encode_weights(tensors, work.metadata()))

        return script

    digests = []
    for attempt in range(2):
        settings = config(
            round={"min_devices": 3}, evaluation={"data": None}, store=tmp_path / f"store{attempt}"
        )
        with (
            Peer(fleet, "a", url, awkward(1)),
            Peer(fleet, "b", url, awkward(2)),
            Peer(fleet, "c", url, awkward(3)),
        ):
            if attempt:
                assert (
                    start_dying(settings, url, "receive", 2, tmp_path).wait(60) == -signal.SIGKILL
                )
            server = running(settings, url)
            finished = server.wait()
        assert len(server.events_of(control.RoundClosed)[0].merged) == 3
        digests.append({k: v.tobytes() for k, v in weights_of(settings, finished.run, 1).items()})
    assert digests[0] == digests[1]


def test_a_run_goes_on_unjudged_where_its_test_set_was_damaged(
    url, config, running, fleet, tmp_path, test_set
):
    """The run says so, and why; only one that begins needs its test set."""
    path = tmp_path / "test.npz"
    path.write_bytes(test_set.read_bytes())
    settings = config(round={"rounds": 1}, evaluation={"data": {"kind": "npz", "path": path}})
    with Peer(fleet, "d", url, honest()):
        assert start_dying(settings, url, "receive", 1, tmp_path).wait(60) == -signal.SIGKILL
        path.write_bytes(test_set.read_bytes()[:99])
        server = running(settings, url)
        finished = server.wait()
        assert (finished.status, finished.rounds) == ("finished", 1), finished.error
        with pytest.raises(DataError, match=r"test.npz is the beginning of an archive"):
            running(settings.model_copy(update={"store": tmp_path / "other"}), url).wait()
    with contextlib.closing(Store(settings.store, read_only=True)) as store:
        (record,) = store.rounds(finished.run)
        (note,) = [event for event in store.events(run=finished.run) if event.kind == "not-judged"]
    assert record.evaluation is None
    assert f"{path} is the beginning of an archive" in record.note
    assert note.detail == f"this run continues without evaluating its versions: {record.note}"


def test_another_configuration_does_not_continue_the_old_run(
    url, config, running, fleet, tmp_path, caplog
):
    """A run with other settings begins anew and says, on the terminal and in the store, which ended
    the old one.
    """
    settings = config(round={"rounds": 2}, evaluation={"data": None})
    with Peer(fleet, "d", url, honest()):
        assert start_dying(settings, url, "receive", 1, tmp_path).wait(60) == -signal.SIGKILL
        page = {"port": 1}  # counts as little as where broker and store are
        changed_config = config(
            round={"rounds": 1}, evaluation={"data": None}, train={"epochs": 9}, view=page
        )
        finished = running(changed_config, url).wait()
    store = Store(settings.store, read_only=True)
    new, old = store.runs()
    store.close()
    assert new.id == finished.run
    assert (new.status, old.status) == ("finished", "stopped")
    changed = "train.epochs, round.rounds"
    assert (
        old.detail
        == f"run {new.id} started again from the beginning, with different settings: {changed}"
    )
    assert f"run {old.id} ends unfinished: {old.detail}" in caplog.text


@pytest.mark.parametrize(
    "kind", [pytest.param(embedded_broker, marks=pytest.mark.slow), mosquitto_broker]
)
def test_a_broker_that_dies_in_mid_round_loses_nothing(kind, config, running, fleet, tmp_path):
    """Sessions and retained messages are gone with the broker; offers are made again and the round
    closes.
    """
    with kind(tmp_path) as broker:
        restarts = []

        def with_outage(peer, work):
            if not restarts:
                restarts.append(1)
                broker.stop()
                time.sleep(1.0)  # the outage itself
                broker.start()
            honest()(peer, work)

        with Peer(fleet, "a", broker.url, with_outage), Peer(fleet, "b", broker.url, honest()):
            settings = config(
                round={"min_devices": 2, "deadline_seconds": 60}, evaluation={"data": None}
            )
            server = running(settings, broker.url)
            finished = server.wait(90)
    assert finished.status == "finished", finished.error
    assert set(server.events_of(control.RoundClosed)[0].merged) == {"a", "b"}


@pytest.mark.parametrize(
    "kind", [pytest.param(embedded_broker, marks=pytest.mark.slow), mosquitto_broker]
)
def test_offers_are_made_again_after_a_broker_lost_its_sessions(
    kind, config, running, fleet, tmp_path
):
    """A device whose offer went down with the broker gets it again at once, long before it would be
    nudged.
    """
    with kind(tmp_path) as broker:
        restarts = []

        def forgets(peer, work):
            if restarts:
                honest()(peer, work)
                return
            restarts.append(1)
            broker.stop()
            broker.start()

        with Peer(fleet, "a", broker.url, forgets) as peer:
            settings = config(
                round={"deadline_seconds": 100, "nudge_seconds": 90}, evaluation={"data": None}
            )
            finished = running(settings, broker.url).wait(60)
    assert finished.status == "finished", finished.error
    assert len({offer.task for offer in peer.offers}) == 1
    assert len(peer.offers) >= 2


def test_a_device_that_comes_back_gets_its_offer_again(url, config, running, fleet):
    """A device that was restarted in mid-round, with nothing in memory, is offered its task
    anew.
    """
    settings = config(round={"min_devices": 1, "nudge_seconds": 60}, evaluation={"data": None})
    first = Peer(fleet, "d", url, lambda _peer, _work: None)
    first.__enter__()
    server = running(settings, url)
    first.wait_for(lambda peer: peer._started)
    first.__exit__()
    with Peer(fleet, "d", url, honest()) as second:
        assert server.wait().status == "finished"
    assert {offer.task for offer in second.offers} == {first.offers[0].task}
    assert isinstance(second.offers[0], Offer)
