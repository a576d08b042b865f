"""Updates that other processes receive: the same bits, refusals and counts, whatever becomes of
those processes.
"""

import contextlib
import itertools
import os
import random
import signal
import threading
import time

import numpy as np
import pytest

from broker_server.rounds.artifacts import load_artifacts
from broker_server.rounds.collection_end import ClosingRule
from broker_server.rounds.planning import open_collection
from broker_server.rounds.run_context import prepare_run
from broker_server.service import receivers
from broker_server.service.partial_uploads import PartialUploads
from broker_server.service.receiver import Receiver, TaskChanges
from broker_server.service.receiver_messages import (
    AnnouncedUpdate,
    AssignedTask,
    AssignedTasks,
)
from broker_server.settings.broker import BrokerConfig
from broker_server.store import Store, TaskRecord
from fleet_protocol import control
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.blobs import blob_ref, encode_chunk, iter_chunks
from fleet_protocol.encodings import encode
from fleet_protocol.errors import RefusalReason, TransportError
from fleet_protocol.mapped_tensors import blob_in
from fleet_protocol.messages import BlobRef, UploadAck, UploadRefused
from fleet_protocol.transport import Received
from fleet_protocol.weights import encode_weights
from tests.broker_server.peer import CHUNK_BYTES, Peer, honest
from tests.broker_server.test_bad_input import (
    nan,
    not_safetensors,
    refusals,
    tensors_of,
    wrong_shape,
)
from tests.broker_server.test_resume import weights_of
from tests.broker_server.update_work import count_update_work
from tests.brokers import mosquitto_broker

PADDING = 40 * CHUNK_BYTES  # in the metadata, so that an update takes a while


def awkward(seed, send=Peer.send):
    """Updates in many chunks, whose sums depend on their order."""

    def script(peer, work):
        rng = np.random.default_rng([seed, work.offer.round])
        # The library returns tensors in no particular order.
        weights = sorted(work.weights.items())
        tensors = {
            name: value + rng.standard_normal(value.shape, np.float32) for name, value in weights
        }
        data = encode_weights(tensors, work.metadata(pad="x" * PADDING))
        send(peer, work, data)

    return script


@pytest.fixture
def mosquitto(tmp_path):
    with mosquitto_broker(tmp_path) as broker:
        yield broker.url


@pytest.fixture
def outcome(mosquitto, config, running, fleet, tmp_path):
    """Does two rounds of three devices, one of which does something else than `Peer.send`: the
    bits, and the server.
    """
    attempts = itertools.count()

    def run(count, before=None, during=None, hosts=()):
        settings = config(
            round={"min_devices": 3, "rounds": 2, "quorum": 1.0, "deadline_seconds": 300},
            evaluation={"data": None},
            broker={
                "url": mosquitto,
                "receivers": count,
                "receiver_hosts": hosts,
                "connect_timeout_seconds": 300,
            },
            store=tmp_path / f"store-{next(attempts)}",
        )
        begun = threading.Event()

        def disturbed(peer, work, data):
            assert begun.wait(60)
            before(server, peer, work, data)

        with (
            Peer(fleet, "a", mosquitto, awkward(1, disturbed if before else Peer.send)),
            Peer(fleet, "b", mosquitto, awkward(2)),
            Peer(fleet, "c", mosquitto, awkward(3)),
        ):
            server = running(settings, mosquitto)
            begun.set()
            if during is not None:
                threading.Thread(target=during, args=(server,), daemon=True).start()
            finished = server.wait(500)
        assert finished.status == "finished", finished.error
        assert [sorted(event.merged) for event in server.events_of(control.RoundClosed)] == [
            ["a", "b", "c"]
        ] * 2
        received = [
            (event.round, event.device) for event in server.events_of(control.UpdateReceived)
        ]
        assert sorted(received) == [(number, name) for number in (1, 2) for name in "abc"], (
            "each is counted once"
        )
        return {
            name: value.tobytes() for name, value in weights_of(settings, finished.run, 2).items()
        }, server

    return run


def test_any_number_of_receivers_merges_to_the_same_bits(outcome):
    """The order in which updates are merged is the server's, whoever took them; their bytes are
    counted the same.
    """
    (alone, server), *others = (outcome(count) for count in (0, 1, 2))
    assert server.server.receivers is None
    for bits, other in others:
        assert bits == alone
        assert not refusals(other)
        assert other.finished.payload_bytes == server.finished.payload_bytes
        assert other.finished.wire_bytes == pytest.approx(server.finished.wire_bytes, rel=0.2)


def kill(server):
    for pid in server.server.receivers.pids:
        os.kill(pid, signal.SIGKILL)


def before_a_chunk(server, peer, work, data):
    kill(server)
    peer.send(work, data)


def after_some_chunks(server, peer, work, data):
    peer.upload(work.offer.task, data, ((0, 20),))
    peer.link.drain(time.monotonic() + 60)
    kill(server)
    peer.send(work, data)


def before_the_announcement(server, peer, work, data):
    peer.upload(work.offer.task, data)
    peer.link.drain(time.monotonic() + 60)
    kill(server)
    peer.send(work, data)


def while_chunks_are_missing(server, peer, work, data):
    message = peer.done(work, data)
    peer._update = (work, data, message.update, message)
    peer.upload(work.offer.task, data, ((0, 5),))
    peer.reply(message)
    peer.link.drain(time.monotonic() + 60)
    kill(server)


def after_the_announcement(server, peer, work, data):
    peer.send(work, data)
    peer.link.drain(time.monotonic() + 60)
    kill(server)


STATES = [
    before_a_chunk,
    after_some_chunks,
    before_the_announcement,
    while_chunks_are_missing,
    after_the_announcement,
]


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_receivers_that_are_killed_lose_nothing(state, outcome):
    """Killed in any state of an upload, they are started again and ask for what they had not told
    of.
    """
    undisturbed, _ = outcome(0)
    bits, server = outcome(2, state)
    assert bits == undisturbed
    store = Store(server.config.store, read_only=True)
    assert any(event.kind == "receiver-ended" for event in store.events())
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_receivers_that_are_killed_at_any_moment_lose_nothing(seed, outcome):
    """Ten times within two rounds, one or both of them."""
    over = threading.Event()

    def killing(server):
        moments = random.Random(seed)
        for _ in range(10):
            if over.wait(moments.uniform(0.05, 1.5)):
                return
            for pid in moments.sample(server.server.receivers.pids, moments.choice([1, 1, 2])):
                with contextlib.suppress(ProcessLookupError):  # it was killed a moment ago
                    os.kill(pid, signal.SIGKILL)

    undisturbed, _ = outcome(0)
    try:
        bits, _ = outcome(2, during=killing)
    finally:
        over.set()
    assert bits == undisturbed


@pytest.mark.slow
def test_a_receiver_that_hangs_is_started_again(outcome, monkeypatch):
    """It tells something every second; one that does not is killed, and the round goes on."""
    monkeypatch.setattr(receivers, "HANG_SECONDS", 10.0)
    stopped = []

    def hanging(server, peer, work, data):
        if not stopped:
            stopped.extend(server.server.receivers.pids)
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
        peer.send(work, data)

    bits, server = outcome(2, hanging)
    assert not set(stopped) & set(server.server.receivers.pids)
    assert bits == outcome(0)[0]


def test_bad_updates_are_refused_by_receivers_as_by_the_server(mosquitto, config, running, fleet):
    """Their senders are told why, the refusals are counted, damaged chunks and wholes are asked for
    again.
    """

    def noisy(peer, work):
        data = encode_weights(tensors_of(work), work.metadata())
        topic = peer.topics.upload(work.offer.task, 0)
        frame = encode_chunk(data, 0, CHUNK_BYTES)
        peer.link.publish(topic, frame[:30])
        peer.link.publish(topic, frame[:-1] + bytes([frame[-1] ^ 1]))
        peer.send(work, data)

    def damaged(peer, work):
        data = encode_weights(tensors_of(work), work.metadata())
        message = peer.done(work, data)
        peer._update = (work, bytes(len(data)), message.update, message)
        peer.upload(work.offer.task, bytes(len(data)))
        peer.reply(message)

    scripts = {
        "nan": nan,
        "shape": wrong_shape,
        "text": not_safetensors,
        "damaged": damaged,
        "noisy": noisy,
    }
    peers = [
        Peer(fleet, name, mosquitto, script)
        for name, script in (scripts | {"good": honest()}).items()
    ]
    settings = config(
        round={"min_devices": 6, "quorum": 0.3, "deadline_seconds": 300},
        evaluation={"data": None},
        broker={"receivers": 2, "connect_timeout_seconds": 300},
    )
    for peer in peers:
        peer.__enter__()
    try:
        server = running(settings, mosquitto)
        server.wait(500)
        for peer in peers[:4]:
            peer.wait_for(lambda peer: peer.got(UploadRefused), 100)
    finally:
        for peer in peers:
            peer.__exit__()
    reasons = [
        RefusalReason.NOT_FINITE,
        RefusalReason.BAD_SHAPE,
        RefusalReason.MALFORMED,
        RefusalReason.BAD_DIGEST,
    ]
    assert [peer.got(UploadRefused)[0].reason for peer in peers[:4]] == reasons
    assert sorted(server.events_of(control.RoundClosed)[0].merged) == ["good", "noisy"]
    assert refusals(server) == {"not-finite": 1, "bad-shape": 1, "malformed": 3, "bad-digest": 3}
    assert all(peer.got(UploadAck) for peer in peers[4:])


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """What sshd does with a command: the user's shell runs it, in another folder, with another
    environment.
    """
    program = tmp_path / "bin" / "ssh"
    log = tmp_path / "hosts"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$2 $$" >> {log}\ncd / && exec env -i HOME=/ /bin/sh -c "$3"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return lambda: [line.split() for line in log.read_text().splitlines()]


def test_receivers_on_other_hosts_merge_to_the_same_bits(outcome, ssh):
    """They are started through ssh, in turn, and need nothing of the folder and environment of the
    server.
    """
    bits, _ = outcome(3, hosts=("worker-1", "worker-2"))
    assert sorted(host for host, _ in ssh()) == ["worker-1", "worker-1", "worker-2"]
    assert bits == outcome(0)[0]


@pytest.mark.slow
def test_a_host_that_is_lost_is_asked_again(outcome, ssh, monkeypatch):
    """A receiver there ends by itself when it hears nothing of its server; only then it gets a
    successor.
    """
    monkeypatch.setattr(receivers, "_PING_SECONDS", 1000.0)
    replaced = threading.Event()
    starts = itertools.count()

    class Child(receivers._Child):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            if next(starts):
                replaced.set()

    monkeypatch.setattr(receivers, "_Child", Child)

    def patient(server, peer, work, data):
        if len(ssh()) == 1:
            replaced.wait(60)
        peer.send(work, data)

    bits, server = outcome(1, patient, hosts=("worker-1",))
    store = Store(server.config.store, read_only=True)
    line, *_ = [event.detail for event in store.events() if event.kind == "receiver-ended"]
    store.close()
    assert "receiver 1 on worker-1 ended with" in line
    assert bits == outcome(0)[0]


@pytest.mark.parametrize(
    ("broker", "problem"),
    [
        ({"url": "mqtt://b", "receiver_hosts": ["a"]}, "names 1 hosts for 0 receivers"),
        (
            {"receivers": 1, "receiver_hosts": ["a"]},
            "need the url of a broker that they can reach, not 'embedded'",
        ),
        (
            {"url": "mqtt://b", "receivers": 1, "receiver_hosts": ["-oProxyCommand=x"]},
            "receiver_hosts",
        ),
    ],
)
def test_hosts_that_cannot_be_are_refused(broker, problem):
    """Before anything is started."""
    with pytest.raises(ValueError, match=problem):
        BrokerConfig.model_validate(broker)


@pytest.fixture
def receiver(config, artifacts, tmp_path):
    """A receiver with one task, and an update for it."""
    settings = config()
    context = prepare_run(
        "r", settings, load_artifacts(artifacts, settings.model.arch, chunk_bytes=CHUNK_BYTES)
    )
    tier_set = context.tiers[0]
    store = BlobStore(tmp_path / "updates")
    blobs = BlobStore(tmp_path / "blobs")
    tensors = {spec.name: np.zeros(spec.shape, np.float32) for spec in tier_set.manifest.parameters}
    sent = BlobRef(digest=blobs.put(encode_weights(tensors)), size=10_000, chunk_bytes=CHUNK_BYTES)
    record = TaskRecord("t", "r", 1, "pi", "train", tier_set.tier.id, "k", 0, sent, sent)
    collection = open_collection(context, [record], ClosingRule(1.0, 1, 0.0, 1.0, 0.0, 0.0))
    task = collection.tasks["t"]
    order = AssignedTasks(
        tasks=(AssignedTask(record=record, instructions=0),),
        instructions=(task.instructions,),
        manifests={tier_set.tier.id: task.manifest},
    )
    order = AssignedTasks.model_validate_json(order.to_bytes())  # as it travels
    receiver = Receiver(PartialUploads(store, blobs))
    assert receiver.assign(order) == TaskChanges(added={"t"}, removed=set())
    metadata = {"task": "t", "run": "r", "round": "1", "version": "0", "tier": tier_set.tier.id}
    return receiver, encode_weights(tensors, metadata), tier_set.tier.id, store


def test_chunks_that_another_device_signed_are_counted_and_kept_from_an_update(receiver):
    """They are whole, but not their owner's; what the owner signs is taken."""
    receiver, data, tier, store = receiver
    ref = blob_ref(data, CHUNK_BYTES)
    frames = [frame for _, frame in iter_chunks(data, CHUNK_BYTES, ((0, ref.chunks),))]
    receiver.announce(AnnouncedUpdate(task="t", tier=tier, update=ref))
    for frame in frames:
        receiver.receive_chunk("t", Received("", frame, signer="other"))
    report = receiver.collect_report()
    refusals = {(outcome.kind, outcome.reason) for outcome in report.outcomes}
    assert refusals == {("counted", RefusalReason.FORGED)}
    assert not report.active_tasks
    for frame in frames:
        receiver.receive_chunk("t", Received("", frame, signer="pi"))
    report = receiver.collect_report()
    (outcome,) = report.outcomes
    assert (outcome.kind, outcome.update, outcome.merged) == ("stored", ref.digest, ref.digest)
    assert report.active_tasks == ("t",)
    assert store.read(ref.digest) == data


def test_a_receiver_decodes_an_update_once(receiver, monkeypatch):
    """Its server gets a digest and a distance; an announcement that comes again decodes nothing."""
    receiver, data, tier, store = receiver
    work_done = count_update_work(monkeypatch)
    task = receiver._tasks["t"]
    upload = task.instructions.upload.model_copy(update={"encoding": "int8"})
    task.instructions = task.instructions.model_copy(update={"upload": upload})
    metadata, tensors = blob_in(data)
    data = encode_weights(encode(tensors, "int8"), metadata)
    ref = blob_ref(data, CHUNK_BYTES)
    order = AnnouncedUpdate(task="t", tier=tier, update=ref)
    receiver.announce(order)
    for _, frame in iter_chunks(data, CHUNK_BYTES, ((0, ref.chunks),)):
        receiver.receive_chunk("t", Received("", frame))
    receiver.announce(order)
    first, again = receiver.collect_report().outcomes
    assert first == again
    assert (first.kind, first.update, first.distance.norm) == ("stored", ref.digest, 0.0)
    assert store.tensors(first.merged).keys() == tensors.keys()
    assert work_done == dict.fromkeys(("parsed", "decoded", "serialised", "measured"), 1)


def test_what_was_reported_is_reported_again_where_it_is_asked_for_again(receiver):
    """The server may be asked once more before it has read the report; another update is begun
    anew.
    """
    receiver, data, tier, _ = receiver
    ref = blob_ref(data, CHUNK_BYTES)
    for _, frame in iter_chunks(data, CHUNK_BYTES, ((0, ref.chunks),)):
        receiver.receive_chunk("t", Received("", frame))
    order = AnnouncedUpdate(task="t", tier=tier, update=ref)
    outcomes = []
    for _ in range(2):
        receiver.announce(order)
        outcomes += receiver.collect_report().outcomes
    assert [outcome.kind for outcome in outcomes] == ["stored", "stored"]
    other = ref.model_copy(update={"digest": "1" * 64})
    receiver.announce(order.model_copy(update={"update": other}))
    receiver.ask_for_missing(float("inf"))
    (outcome,) = receiver.collect_report().outcomes
    assert (outcome.kind, outcome.update) == ("missing", "1" * 64)
    assert outcome.ranges == ((0, ref.chunks),)


def test_a_host_that_cannot_be_reached_is_named(ssh, config, running, mosquitto, tmp_path):
    """At once, before a run begins."""
    (tmp_path / "bin" / "ssh").write_text("#!/bin/sh\necho no such host >&2; exit 255\n")
    settings = config(broker={"url": mosquitto, "receivers": 1, "receiver_hosts": ["nowhere"]})
    with pytest.raises(TransportError, match="a process on nowhere that receives updates"):
        running(settings, mosquitto)
