"""A device process against a real broker and a scripted server: the protocol in motion, and what
may go wrong.
"""

import contextlib
import math
import time
import types
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from device_runtime.agent.loop import Agent
from device_runtime.agent.machine import Event, State
from device_runtime.agent.task_in_hand import TaskInHand
from device_runtime.settings import load_device_config
from fleet_protocol.blobs import encode_chunk
from fleet_protocol.errors import RefusalReason
from fleet_protocol.mapped_tensors import blob_in, tensors_in
from fleet_protocol.messages import Accept, Done, Introduce, NeedChunks, Progress, Refuse
from fleet_protocol.messages.presence import ALIVE_SECONDS
from fleet_protocol.transport import Connected, Disconnected, Received
from tests.broker_server.peer import profile
from tests.brokers import TestBroker, any_broker, embedded_broker, mosquitto_broker
from tests.device_runtime.device_process import DeviceProcess
from tests.device_runtime.scripted_server import ScriptedServer, scripted_server
from tests.device_runtime.test_task_store import make_record
from tests.device_runtime.tiny_set import (
    TinySet,
    broken_train_graph,
    initial_weights,
    overflowing_weights,
    samples,
    write_tiny_set,
)

LONG = {"epochs": 6_000}  # some seconds: heard of while it trains


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinySet:
    return write_tiny_set(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(
    scope="module",
    params=[mosquitto_broker, pytest.param(embedded_broker, marks=pytest.mark.slow)],
    ids=["mosquitto", "embedded"],
)
def broker(request, tmp_path_factory) -> Iterator[TestBroker]:
    with request.param(tmp_path_factory.mktemp("broker")) as running:
        yield running


@contextlib.contextmanager
def running_device(tmp_path: Path, url: str, *, data=None, **options) -> Iterator[DeviceProcess]:
    x, y = data or samples(50)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    device = DeviceProcess(tmp_path, url, {"kind": "npz", "path": "data.npz"}, **options)
    device.start()
    try:
        yield device
    finally:
        device.kill()


@contextlib.contextmanager
def fleet(
    tmp_path: Path, broker: TestBroker, tiny: TinySet, **options
) -> Iterator[tuple[ScriptedServer, DeviceProcess]]:
    device_id = f"d-{zlib.crc32(str(tmp_path).encode()):08x}"
    with (
        scripted_server(broker.url, tiny.blobs) as server,
        running_device(tmp_path, broker.url, device=device_id, **options) as device,
    ):
        server.wait_state("idle", device_id)
        yield server, device


def test_a_task_from_offer_to_acknowledgement(tmp_path, broker, tiny):
    """Offer, blobs, training, upload, acknowledgement; then a statistics task and a second round in
    one session.
    """
    with fleet(tmp_path, broker, tiny) as (server, device):
        profile = server.profiles[-1]
        assert profile.examples == 45
        assert "onnx" in profile.backends
        weights = initial_weights()
        server.offer(device.id, tiny.choice(weights), round=3, task="t1")
        update = server.wait_update("t1")
        assert blob_in(update)[0] == {
            "task": "t1",
            "run": "run1",
            "round": "3",
            "version": "0",
            "tier": "w1.00-d1",
        }
        new = tensors_in(update)
        assert sorted(new) == sorted(weights)
        assert all(np.abs(new[name] - weights[name]).max() > 1e-3 for name in weights)
        done = server.wait_message(Done, "t1")
        assert (done.metrics.examples, done.metrics.batches, done.metrics.labels) == (
            45,
            12,
            (0, 1, 2, 3),
        )
        assert done.metrics.evaluation.examples == 5
        server.offer(device.id, tiny.choice(new), round=3, task="t2", routine="statistics")
        statistics = tensors_in(server.wait_update("t2"))
        assert sorted(statistics) == ["stat.norm.mean", "stat.norm.var"]
        assert server.heard(Done, "t2")[0].metrics.batches == 6
        hiding = {"hiding": {"clip": 1.0, "deviation": 1.0}}
        server.offer(device.id, tiny.choice(new), round=4, task="t3", upload=hiding, train=LONG)
        server.wait_update("t3")
        assert {m.loss for m in server.heard(Progress, "t3")} == {
            None
        }  # nor that, where its part is hidden
        assert server.wait_message(Done, "t3").metrics.labels == ()
        manifest = tiny.choice(new).artifact_set.digest
        assert ["artifact_set" in m.lacks for m in server.heard(Accept)] == [True, False, False]
        assert manifest not in {m.digest for m in server.heard(NeedChunks)}
        device.wait_log("the server has the update", times=3)
        assert device.terminate() == 0
        assert server.wait(lambda: not server.statuses[-1].online) is None
        chain = " ".join(device.states())
        assert chain == (
            "starting probing idle fetching training uploading dropping idle fetching measuring "
            "uploading dropping "
            "idle fetching training uploading dropping idle stopped"
        )


@pytest.mark.slow
def test_a_broker_that_dies_in_mid_task(tmp_path, broker, tiny):
    """Training goes on while the broker is away; then the device is back online and the update
    arrives.
    """
    with fleet(tmp_path, broker, tiny) as (server, device):
        server.offer(device.id, tiny.choice(initial_weights()), train=LONG)
        assert server.wait_message(Progress).loss is not None
        broker.stop()
        device.wait_log("computed ")
        broker.start()
        server.wait_update("t1")
        device.wait_log("state=idle", times=2)
        assert device.states()[-4:] == ["training", "uploading", "dropping", "idle"]
        assert server.statuses[-1].online


@pytest.fixture(scope="module")
def one_broker(tmp_path_factory) -> Iterator[TestBroker]:
    with any_broker(tmp_path_factory.mktemp("broker")) as running:
        yield running


def test_lost_and_corrupted_chunks_are_asked_for_again(tmp_path, one_broker, tiny):
    """Chunks that the broker loses or damages are repaired by digest, those that arrived are not
    sent twice.
    """
    sent: dict[tuple[str, int], int] = {}

    def tamper(digest: str, index: int, frame: bytes) -> bytes | None:
        sent[digest, index] = count = sent.get((digest, index), 0) + 1
        if count == 1 and index % 3 == 0:
            return None
        if count == 1 and index % 3 == 1:
            return frame[:-1] + bytes([frame[-1] ^ 1])
        return frame

    with fleet(tmp_path, one_broker, tiny, repair_seconds=3.0) as (server, device):
        server.script.tamper = tamper
        server.offer(device.id, tiny.choice(initial_weights()))
        server.wait_update("t1")
        assert {count for (_, index), count in sent.items() if index % 3 == 2} <= {1}
        assert {count for (_, index), count in sent.items() if index % 3 != 2} == {2}


def test_lost_upload_chunks_are_sent_again(tmp_path, one_broker, tiny):
    """The server names the chunks it misses and gets those."""
    with fleet(tmp_path, one_broker, tiny) as (server, device):
        server.script.lose_upload = {0}
        server.offer(device.id, tiny.choice(initial_weights()))
        server.wait_update("t1")
        device.wait_log("the server lacks chunks ((0, 1),)")
        assert server.summary() == ["Accept", "Done", "Done"]


@pytest.mark.slow
def test_repeated_offers_change_nothing(tmp_path, one_broker, tiny):
    """A device answers a repeated offer with where it stands, and one for a finished task not at
    all.
    """
    with fleet(tmp_path, one_broker, tiny) as (server, device):
        choice = tiny.choice(initial_weights())
        server.offer(device.id, choice, train=LONG)
        server.wait_message(Progress)
        server.offer(device.id, choice, train=LONG)
        server.wait_message(Accept, count=2)
        server.wait_update("t1")
        device.wait_log("the server has the update")
        server.offer(device.id, choice, train=LONG)
        device.wait_log(
            "ignored the offer of task t1, which has ended on this board (acknowledged)"
        )
        assert (
            " ".join(device.states())
            == "starting probing idle fetching training uploading dropping idle"
        )


def test_a_finished_task_that_is_offered_again_and_again_is_done_anew(tmp_path, one_broker, tiny):
    """A server that goes on from a backup lacks the update; one echo of an offer is the
    broker's.
    """
    with fleet(tmp_path, one_broker, tiny) as (server, device):
        choice = tiny.choice(initial_weights())
        for echo in (1, 2):
            server.offer(device.id, choice)
            device.wait_log("the server has the update", times=echo)
            device.wait_log("state=idle", times=1 + echo)
            server.offer(device.id, choice)
            device.wait_log(
                "ignored the offer of task t1, which has ended on this board (acknowledged)",
                times=echo,
            )
        assert " ".join(device.states()).count("fetching training uploading dropping idle") == 2


@pytest.mark.slow
def test_a_quota_that_holds_no_set_is_told(tmp_path, one_broker, tiny):
    """The board works, but fetches in every round what it has just deleted."""
    with fleet(tmp_path, one_broker, tiny, max_cache_bytes=100) as (server, device):
        server.offer(device.id, tiny.choice(initial_weights()))
        server.wait_update("t1")
        device.wait_log(
            "max_cache_bytes = 100 is smaller than one artifact set, which is therefore downloaded for every task"
        )


def agent_named(name: str, tmp_path: Path) -> Agent:
    """An agent that is connected to nothing."""
    (tmp_path / "device.toml").write_text(
        f'fleet = "lab"\ndevice = "{name}"\nbroker = "mqtt://127.0.0.1"\nstate_dir = "state"\n'
        '[data]\nkind = "npz"\npath = "data.npz"\n'
    )
    return Agent(load_device_config(tmp_path / "device.toml"))


def test_the_time_of_a_task_stands_still_while_the_broker_is_away(tmp_path):
    """As that of its round does: an update is kept for hours, and sent when the board is back."""
    agent = agent_named("d", tmp_path)
    now = time.monotonic()
    agent.ctx.state, agent.ctx.task = (
        State.FETCHING,
        TaskInHand(make_record(), deadline=now + 60, started=now),
    )
    agent._on_entry(Disconnected("cut"))
    agent._on_time(now + 3600)
    assert not agent.ctx.events
    agent._connection.gone_since -= 3600
    agent._connection.greeted = False  # what it says to the broker is not looked at here
    agent._on_entry(Connected(session_present=True))
    assert now + 3600 < agent._deadline <= time.monotonic() + 3660
    agent._on_time(agent._deadline)
    assert list(agent.ctx.events) == [Event.EXPIRED]


def test_a_board_at_work_that_was_silent_says_that_it_is_there(tmp_path):
    """Not what it has just said, not while the broker is away, and not where it has nothing to
    do.
    """
    agent = agent_named("d", tmp_path)
    said = []
    agent.ctx.uplink.link = types.SimpleNamespace(
        publish=lambda topic, payload, **_: said.append((topic, payload))
    )
    agent.ctx.uplink.last_sent_at = time.monotonic() - ALIVE_SECONDS
    assert agent._silent_at == math.inf  # it is not at work
    agent.ctx.state = State.TRAINING
    agent._connection.gone_since = time.monotonic()
    assert agent._silent_at == math.inf
    agent._connection.gone_since = None
    agent._handle_next()
    assert [topic for topic, _ in said] == ["shoal/v1/lab/devices/d/status"]
    assert b'"training"' in said[0][1]
    assert len(said[0][1]) < 60
    assert agent._silent_at > time.monotonic() + ALIVE_SECONDS / 2


def test_a_server_that_asks_who_this_is_gets_profile_and_status(tmp_path):
    """What was said before was lost; asking a hundred times a second brings one answer."""
    agent = agent_named("d", tmp_path)
    said = []
    ctx = agent.ctx
    ctx.uplink.link = types.SimpleNamespace(
        publish=lambda topic, _payload, **_: said.append(topic.rpartition("/")[2])
    )
    ctx.state = State.IDLE
    ctx.uplink.sent_profile = profile()
    ctx.setup = types.SimpleNamespace()
    ctx._profile = lambda _setup: profile()
    question = Received("shoal/v1/lab/devices/d/task", Introduce().to_bytes())
    for _ in range(100):
        agent._on_entry(question)
    assert said == ["profile", "status"]


def test_two_agents_of_one_name_are_told(tmp_path, caplog):
    """The broker ends the connection of one whenever the other connects, and says nothing."""
    agent = agent_named("twin", tmp_path)
    for _ in range(4):
        agent._on_entry(Disconnected("cut"))
    assert "another agent" not in caplog.text
    agent._on_entry(Disconnected("cut"))
    assert "if another agent also runs as 'twin', give one of them another name" in caplog.text


@pytest.mark.slow
def test_cancel_and_newer_rounds_end_a_task_at_once(tmp_path, one_broker, tiny):
    """A cancelled task stops between two steps; an offer of a newer round takes the place of the
    one in hand.
    """
    with fleet(tmp_path, one_broker, tiny) as (server, device):
        choice = tiny.choice(initial_weights())
        endless = {"epochs": 10**6}
        first = server.offer(device.id, choice, train=endless)
        server.wait_message(Progress)
        server.cancel(device.id, first)
        device.wait_log("state=idle", times=2)
        server.offer(device.id, choice, train=endless, task="t2", round=5)
        server.wait_message(Progress, "t2")
        server.offer(device.id, choice, train=endless, task="old", round=4)
        device.wait_log("ignored an offer of the earlier round 4")
        server.offer(device.id, choice, task="t3", round=6)
        server.wait_update("t3")
        device.wait_log("state=idle", times=4)
        chain = " ".join(device.states())
        assert chain == (
            "starting probing idle fetching training dropping idle fetching training dropping idle "
            "fetching training uploading dropping idle"
        )
        assert not server.heard(Refuse)


def test_a_passed_deadline_is_dropped_quietly(tmp_path, one_broker, tiny):
    """Nobody waits for a closed round, so nobody is told; the device is ready for the next."""
    with fleet(tmp_path, one_broker, tiny) as (server, device):
        choice = tiny.choice(initial_weights())
        server.offer(device.id, choice, train={"epochs": 10**6}, seconds_left=0.7)
        device.wait_log("the round has closed")
        server.offer(device.id, choice, task="t2")
        server.wait_update("t2")
        assert not server.heard(Refuse)


def test_offers_a_board_cannot_take(tmp_path, one_broker, tiny):
    """Too wide or too deep a tier is refused with the limits; a statistics task has none."""
    with fleet(tmp_path, one_broker, tiny, max_width=0.5) as (server, device):
        choice = tiny.choice(initial_weights())
        server.offer(device.id, choice)
        refusal = server.wait_message(Refuse, "t1")
        assert refusal.reason is RefusalReason.UNSUPPORTED
        assert "offered w1.00-d1; this board is limited to width 0.5" in refusal.detail
        server.offer(device.id, choice)
        assert server.wait_message(Refuse, "t1", count=2).detail == refusal.detail
        server.offer(device.id, choice, task="t2", routine="statistics")
        server.wait_update("t2")


@pytest.mark.slow
def test_a_blob_with_another_content_is_refused(tmp_path, one_broker, tiny):
    """Three whole arrivals that do not match the digest end the task; the next one works."""
    with fleet(tmp_path, one_broker, tiny) as (server, device):
        choice = tiny.choice(initial_weights())
        honest = choice.weights.digest
        forged = bytearray(tiny.blobs.read(honest))
        forged[-1] ^= 1
        server.script.tamper = lambda digest, index, frame: (
            encode_chunk(bytes(forged), index, choice.weights.chunk_bytes)
            if digest == honest
            else frame
        )
        server.offer(device.id, choice)
        assert server.wait_message(Refuse).reason is RefusalReason.BAD_DIGEST
        server.script.tamper = lambda _digest, _index, frame: frame
        server.offer(device.id, choice, task="t2")
        server.wait_update("t2")


@pytest.mark.slow
def test_a_set_that_fails_its_self_test_is_not_used(tmp_path, one_broker, tiny):
    """A graph that gives NaN on this board is refused before it sees data, and the good set still
    works after it.
    """
    broken = write_tiny_set(tiny.blobs.root, train_graph=broken_train_graph())
    with fleet(tmp_path, one_broker, tiny) as (server, device):
        server.offer(device.id, broken.choice(initial_weights()))
        refusal = server.wait_message(Refuse)
        assert refusal.reason is RefusalReason.FAILED
        assert "fails its self-test" in refusal.detail
        server.offer(device.id, tiny.choice(initial_weights()), task="t2")
        server.wait_update("t2")
        assert "self-test passed: onnx/train" in device.log()


@pytest.mark.slow
def test_data_that_does_not_fit_is_refused_with_its_path(tmp_path, one_broker, tiny):
    """A label the model does not have, and a loss that is not finite, are told to the server in
    words.
    """
    x, y = samples(50)
    y[7] = 4
    with fleet(tmp_path, one_broker, tiny, data=(x, y)) as (server, device):
        server.offer(device.id, tiny.choice(initial_weights()))
        refusal = server.wait_message(Refuse)
        assert refusal.reason is RefusalReason.NO_DATA
        assert "label 4 of sample 7 in" in refusal.detail
        assert "data.npz is outside 0 to 3" in refusal.detail


def test_a_loss_that_is_not_finite_is_refused(tmp_path, one_broker, tiny):
    """NaN is reported with its round and step, and the device lives on."""
    with fleet(tmp_path, one_broker, tiny) as (server, device):
        server.offer(device.id, tiny.choice(overflowing_weights()), round=9)
        refusal = server.wait_message(Refuse)
        assert refusal.reason is RefusalReason.FAILED
        assert "the loss is nan in round 9 at step 1" in refusal.detail
        device.wait_log("state=idle", times=2)


@pytest.mark.slow
def test_nonsense_is_ignored(tmp_path, one_broker, tiny):
    """Malformed, foreign and misplaced messages are logged and change nothing."""
    with fleet(tmp_path, one_broker, tiny) as (server, device):
        choice = tiny.choice(initial_weights())
        server.say(device.id, b"\xff not json")
        server.say(device.id, b"x" * 300_000)
        offer = server.offer(device.id, choice, fleet="other")
        server.cancel(device.id, offer)
        server.push_chunks(choice.weights.digest, ((0, 1),))
        server.offer(device.id, choice)
        server.wait_update("t1")
        log = device.log()
        assert log.count("ignored a message") == 3
        assert "malformed" in log
        assert "oversized" in log
        assert "ignored a message of fleet other" in log
        assert "ignored cancel of task t1, which is not the current task" in log


@pytest.mark.slow
def test_a_vanished_device_is_offline_by_its_will(tmp_path, one_broker, tiny):
    """A power cut is announced by the broker, a polite end by the device."""
    with fleet(tmp_path, one_broker, tiny) as (server, device):
        device.kill()
        server.wait(lambda: not server.statuses[-1].online, what="the will")
        device.start()
        server.wait(lambda: server.statuses[-1].online, what="the return")
        assert device.terminate() == 0
        server.wait(lambda: not server.statuses[-1].online, what="the farewell")
        assert server.statuses[-1].state == "stopped"
