"""What devices send that must not be merged: each case is refused, counted and logged, and the
round goes on.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from broker_server.rounds.collecting import OpenTask
from broker_server.service import partial_uploads
from broker_server.store import Store, TaskRecord
from broker_server.store.task_records import Alternative, Alternatives
from broker_server.updates.checks import check_done
from broker_server.updates.values import ExpectedUpdate
from fleet_protocol import control
from fleet_protocol.blobs import encode_chunk
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.messages import (
    Accept,
    BlobRef,
    Cancel,
    Done,
    Instructions,
    TaskMetrics,
    TrainSettings,
    UploadAck,
    UploadMissing,
    UploadRefused,
)
from fleet_protocol.weights import encode_weights
from tests.broker_server.peer import CHUNK_BYTES, Peer, honest, silent


def tensors_of(work):
    return {name: value + np.float32(1) for name, value in work.weights.items()}


def nan(peer, work):
    tensors = tensors_of(work)
    tensors["hidden.bias"][2] = np.nan
    peer.send(work, encode_weights(tensors, work.metadata()))


def infinite(peer, work):
    tensors = tensors_of(work)
    tensors["head.weight"][0, 0] = -np.inf
    peer.send(work, encode_weights(tensors, work.metadata()))


def wrong_shape(peer, work):
    tensors = tensors_of(work)
    tensors["hidden.weight"] = tensors["hidden.weight"][:, :-1].copy()
    peer.send(work, encode_weights(tensors, work.metadata()))


def missing_tensor(peer, work):
    tensors = tensors_of(work)
    del tensors["head.bias"]
    peer.send(work, encode_weights(tensors, work.metadata()))


def foreign_tensor(peer, work):
    peer.send(
        work, encode_weights(tensors_of(work) | {"extra": np.zeros(1, np.float32)}, work.metadata())
    )


def wrong_dtype(peer, work):
    tensors = {name: value.astype(np.float64) for name, value in tensors_of(work).items()}
    peer.send(work, encode_weights(tensors, work.metadata()))


def update_of_another_round(peer, work):
    peer.send(work, encode_weights(tensors_of(work), work.metadata(round="7")))


def update_of_another_task(peer, work):
    peer.send(work, encode_weights(tensors_of(work), work.metadata(task="t9-someone")))


def not_safetensors(peer, work):
    peer.send(work, b"\x00" * 700)


def oversized(peer, work):
    peer.send(work, bytes(2 * 1024 * 1024))


def impossible_label(peer, work):
    peer.send(work, encode_weights(tensors_of(work), work.metadata()), labels=(0, 4))


def no_labels(peer, work):
    peer.send(work, encode_weights(tensors_of(work), work.metadata()), labels=())


def another_tier(peer, work):
    peer.send(work, encode_weights(tensors_of(work), work.metadata()), tier="w0.50-d1")


CASES = {
    nan: RefusalReason.NOT_FINITE,
    infinite: RefusalReason.NOT_FINITE,
    wrong_shape: RefusalReason.BAD_SHAPE,
    missing_tensor: RefusalReason.BAD_SHAPE,
    foreign_tensor: RefusalReason.BAD_SHAPE,
    wrong_dtype: RefusalReason.BAD_DTYPE,
    update_of_another_round: RefusalReason.WRONG_ROUND,
    update_of_another_task: RefusalReason.UNKNOWN_TASK,
    not_safetensors: RefusalReason.MALFORMED,
    oversized: RefusalReason.OVERSIZED,
    impossible_label: RefusalReason.BAD_LABELS,
    no_labels: RefusalReason.BAD_LABELS,
    another_tier: RefusalReason.UNSUPPORTED,
}


def refusals(server) -> dict[str, int]:
    store = Store(server.config.store, read_only=True)
    counted: dict[str, int] = {}
    for item in store.refusals():
        counted[item.reason] = counted.get(item.reason, 0) + item.count
    store.close()
    return counted


@pytest.mark.attack(
    "member",
    "Sends updates with wrong shapes, types or names, or with infinite numbers",
    "refused; the log gives the reason and the device's name, and the round closes without the "
    "update",
    "2026-11-28",
)
@pytest.mark.parametrize("script", CASES, ids=lambda script: script.__name__)
def test_a_bad_update_is_refused_and_the_round_closes_without_it(
    script, url, config, running, fleet
):
    """The sender is told why, the refusal is counted under its reason, and the good update alone is
    merged.
    """
    with Peer(fleet, "bad", url, script) as bad, Peer(fleet, "good", url, honest()):
        server = running(
            config(round={"min_devices": 2, "quorum": 0.5}, evaluation={"data": None}), url
        )
        server.wait()
        bad.wait_for(lambda peer: peer.got(UploadRefused))
    assert bad.got(UploadRefused)[0].reason is CASES[script]
    closed = server.events_of(control.RoundClosed)[0]
    assert closed.merged == {"good": "w1.00-d1"}
    assert closed.missing == ("bad",)
    assert refusals(server).get(CASES[script].value, 0) >= 1


@pytest.mark.attack(
    "member",
    "Sends the update of another device as its own",
    "the other device's update counts as usual",
    "2026-11-23",
)
def test_a_copy_of_another_update_takes_nothing_from_it(url, config, running, fleet, monkeypatch):
    """Both have one digest, and one place on the disk: the refusal of the copy took the original
    away before.
    """
    monkeypatch.setattr(partial_uploads, "_HELD_BYTES", 0)
    sent = []

    def original(peer, work):
        sent.append(encode_weights(tensors_of(work), work.metadata()))
        peer.send(work, sent[0])

    def copied(peer, work):
        good.wait_for(lambda peer: peer.got(UploadAck))
        peer.send(work, sent[0])

    with Peer(fleet, "good", url, original) as good, Peer(fleet, "bad", url, copied) as bad:
        server = running(
            config(round={"min_devices": 2, "quorum": 0.5}, evaluation={"data": None}), url
        )
        server.wait()
        bad.wait_for(lambda peer: peer.got(UploadRefused))
    assert bad.got(UploadRefused)[0].reason is RefusalReason.UNKNOWN_TASK
    assert server.events_of(control.RoundClosed)[0].merged == {"good": "w1.00-d1"}


def test_an_update_in_finer_chunks_than_its_task_is_refused():
    """What is missing is counted with every chunk that comes: a million tiny ones held the server
    up for hours.
    """
    cut = BlobRef(digest="0" * 64, size=10_000, chunk_bytes=4096)
    task = TaskRecord("t", "r", 1, "pi", "train", "w1.00-d1", "k", 0, cut, cut)
    metrics = TaskMetrics(
        examples=1, batches=1, labels=(0,), fetch_seconds=0, train_seconds=0, resident_bytes=0
    )
    named = {
        "fleet": "lab",
        "run": "r",
        "round": 1,
        "task": "t",
        "device": "pi",
        "tier": "w1.00-d1",
    }
    done = Done(**named, update=cut, metrics=metrics)
    manifest = SimpleNamespace(parameters=(), trained=(), classes=4)
    expected = ExpectedUpdate(
        task,
        manifest,
        Instructions(train=TrainSettings(learning_rate=0.1, epochs=1, batch_size=1, seed=0)),
    )
    check_done(done, expected)
    finer = cut.model_copy(update={"chunk_bytes": 1024})
    # A device whose broker takes no larger packets cuts a small update finer.
    check_done(done.model_copy(update={"update": finer}), expected)
    many = finer.model_copy(update={"size": 10**8})
    with pytest.raises(RefusedError, match="chunks of 1024 bytes; the smallest allowed have 4096"):
        check_done(done.model_copy(update={"update": many}), expected)


def test_a_device_changes_its_mind_a_few_times_at_most():
    """Each change waits for the disk: a hundred a second, which a device may say, held up everybody
    else.
    """
    ref = BlobRef(digest="0" * 64, size=10_000, chunk_bytes=4096)
    other = Alternative(tier="w0.50-d1", plan_key="k", artifact_set=ref, weights=ref)
    record = TaskRecord(
        "t",
        "r",
        1,
        "pi",
        "train",
        "w1.00-d1",
        "k",
        0,
        ref,
        ref,
        others=Alternatives(items=(other,)),
    )
    task = OpenTask(record, None, None, manifests={"w1.00-d1": None, "w0.50-d1": None})
    assert [task.choose_tier(("w0.50-d1", "w1.00-d1")[number % 2]) for number in range(6)] == [
        True
    ] * 3 + [False] * 3
    assert task.record.tier == "w0.50-d1"


def test_a_damaged_upload_is_asked_for_again(url, config, running, fleet):
    """A blob whose digest is wrong is dropped and requested anew; the whole one is merged."""

    def once_damaged(peer, work):
        data = encode_weights(tensors_of(work), work.metadata())
        if peer.sent_updates == 0:
            peer.sent_updates = 1
            damaged = bytearray(data)
            damaged[-1] ^= 0xFF
            message = peer.done(work, data)
            peer._update = (work, data, message.update, message)
            peer.upload(
                work.offer.task, bytes(damaged)
            )  # chunks are whole, but not those of the announced blob
            peer.reply(message)

    with Peer(fleet, "d", url, once_damaged) as peer:
        server = running(config(evaluation={"data": None}), url)
        server.wait()
    assert server.events_of(control.RoundClosed)[0].merged == {"d": "w1.00-d1"}
    assert peer.got(UploadMissing)[0].ranges
    assert refusals(server) == {"bad-digest": 1}


def test_a_blob_that_stays_damaged_is_refused(url, config, running, fleet):
    """After two repeats the server gives up on an update that never matches its digest."""

    def always_damaged(peer, work):
        good = encode_weights(tensors_of(work), work.metadata())
        message = peer.done(work, good)
        peer._update = (work, bytes(len(good)), message.update, message)
        peer.upload(work.offer.task, bytes(len(good)))
        peer.reply(message)

    with Peer(fleet, "bad", url, always_damaged) as bad, Peer(fleet, "good", url, honest()):
        server = running(config(round={"min_devices": 2}, evaluation={"data": None}), url)
        server.wait()
        bad.wait_for(lambda peer: peer.got(UploadRefused))
    assert bad.got(UploadRefused)[0].reason is RefusalReason.BAD_DIGEST
    assert refusals(server) == {"bad-digest": 3}


def test_missing_chunks_are_asked_for(url, config, running, fleet):
    """Chunks that never arrived are named by the server, and only those are sent again."""

    def with_a_gap(peer, work):
        data = encode_weights(tensors_of(work), work.metadata(pad="x" * 3000))
        message = peer.done(work, data)
        peer._update = (work, data, message.update, message)
        peer.upload(work.offer.task, data, ((0, 1), (2, message.update.chunks)))
        peer.reply(message)

    with Peer(fleet, "d", url, with_a_gap) as peer:
        server = running(config(evaluation={"data": None}), url)
        server.wait()
    assert peer.got(UploadMissing)[0].ranges == ((1, 2),)
    assert server.events_of(control.RoundClosed)[0].merged == {"d": "w1.00-d1"}


@pytest.mark.attack(
    "member",
    "Sends damaged chunks, and chunks of other devices' tasks",
    "counted; the task's update is unaffected",
    "2026-11-21",
)
def test_damaged_and_foreign_chunks_are_counted_and_do_no_harm(url, config, running, fleet):
    """A truncated frame, bytes of another protocol and a flipped bit never reach the part file."""

    def noisy(peer, work):
        data = encode_weights(tensors_of(work), work.metadata())
        topic = peer.topics.upload(work.offer.task, 0)
        frame = encode_chunk(data, 0, CHUNK_BYTES)
        peer.link.publish(topic, frame[:30])
        peer.link.publish(topic, b"GIF89a" + bytes(200))
        peer.link.publish(topic, frame[:-1] + bytes([frame[-1] ^ 1]))
        peer.send(work, data)

    with Peer(fleet, "d", url, noisy):
        server = running(config(evaluation={"data": None}), url)
        server.wait()
    assert server.events_of(control.RoundClosed)[0].merged == {"d": "w1.00-d1"}
    assert refusals(server) == {"malformed": 3}


def test_an_unknown_device_is_refused(url, config, running, fleet):
    """Who never announced itself, or answers another's task, is told and counted; the owner's
    update is merged.
    """
    with Peer(fleet, "ghost", url, silent, announce=False) as ghost:

        def with_impostor(peer, work):
            data = encode_weights(tensors_of(work), work.metadata())
            ghost.reply(ghost.done(work, data))
            ghost.wait_for(lambda other: other.got(UploadRefused))
            peer.send(work, data)

        with Peer(fleet, "owner", url, with_impostor):
            server = running(config(evaluation={"data": None}), url)
            server.wait()
    assert ghost.got(UploadRefused)[0].reason is RefusalReason.UNKNOWN_DEVICE
    assert server.events_of(control.RoundClosed)[0].merged == {"owner": "w1.00-d1"}
    assert refusals(server) == {"unknown-device": 1}


def test_a_message_for_another_round_is_refused_and_the_right_one_still_counts(
    url, config, running, fleet
):
    """A Done that names a wrong round says nothing about this round's update."""

    def confused(peer, work):
        data = encode_weights(tensors_of(work), work.metadata())
        peer.reply(peer.done(work, data, round=9))
        peer.reply(Accept(**peer.head(work.offer, round=9), tier="w1.00-d1"))
        peer.send(work, data)

    with Peer(fleet, "d", url, confused) as peer:
        server = running(config(evaluation={"data": None}), url)
        server.wait()
        peer.wait_for(lambda device: device.got(UploadRefused))
    assert peer.got(UploadRefused)[0].reason is RefusalReason.WRONG_ROUND
    assert peer.got(UploadRefused)[0].round == 9
    assert server.events_of(control.RoundClosed)[0].merged == {"d": "w1.00-d1"}
    assert refusals(server) == {"wrong-round": 2}


@pytest.mark.attack(
    "member",
    "Accepts a task with a tier that the server did not offer, or with terminal markup in place "
    "of the tier",
    "refused as `unsupported`; the device's update still counts for the tier that was offered",
    "2026-11-29",
)
def test_a_tier_that_was_not_offered_is_not_accepted(url, config, running, fleet):
    """Its name appeared in every display of the run, where markup ended the display."""

    def another(peer, work):
        for tier in ("w0.50-d1", "w9.00-d9", "[/red]"):
            peer.reply(Accept(**peer.head(work.offer), tier=tier))
        honest()(peer, work)

    with Peer(fleet, "d", url, another):
        server = running(config(evaluation={"data": None}), url)
        server.wait()
    assert refusals(server) == {"unsupported": 3}
    assert {event.tier for event in server.events_of(control.DeviceAccepted)} == {"w1.00-d1"}
    assert server.events_of(control.RoundClosed)[0].merged == {"d": "w1.00-d1"}


@pytest.mark.attack(
    "outsider",
    "Publishes nonsense on every topic of the fleet",
    "refused as `malformed` and counted; the round closes",
    "2026-11-21",
)
def test_nonsense_on_every_topic_is_counted(url, config, running, fleet):
    """Bytes that are no message, oversized ones and unknown tasks and blobs are refused under their
    reasons.
    """

    def noisy(peer, work):
        topics = peer.topics
        link = peer.link
        link.publish(topics.reply(peer.device), b"\xff\xfe not json")
        link.publish(topics.reply(peer.device), b'{"type": "teleport"}')
        link.publish(topics.reply(peer.device), b" " * 300_000)
        link.publish(topics.status("liar"), b"{}")
        link.publish(topics.server_control, b"{}")
        link.publish(topics.upload("t1-nobody", 0), b"x" * 100)
        link.publish(topics.upload("t1-nobody", 1), b"x" * 100)
        peer.reply(Accept(**peer.head(work.offer, task="t1-nobody"), tier="w1.00-d1"))
        honest()(peer, work)

    with Peer(fleet, "d", url, noisy):
        server = running(config(evaluation={"data": None}), url)
        server.wait()
    assert refusals(server) == {"malformed": 3, "unsupported": 1, "oversized": 1, "unknown-task": 2}
    assert server.events_of(control.RoundClosed)[0].merged == {"d": "w1.00-d1"}


def test_an_update_that_arrives_twice_is_merged_once(url, config, running, fleet):
    """A repeated upload and a repeated announcement get the same acknowledgement and change
    nothing.
    """
    kept = {}

    def stutter(peer, work):
        data = encode_weights(tensors_of(work), work.metadata())
        kept["done"] = peer.done(work, data)
        for _ in range(3):
            peer.upload(work.offer.task, data)
            peer.reply(kept["done"])

    def late_second(peer, work):
        for acknowledged in (1, 2, 3):
            first.wait_for(lambda other, least=acknowledged: len(other.got(UploadAck)) >= least)
            first.reply(kept["done"])
        honest(3.0)(peer, work)

    with Peer(fleet, "first", url, stutter) as first, Peer(fleet, "second", url, late_second):
        server = running(config(round={"min_devices": 2}, evaluation={"data": None}), url)
        finished = server.wait()
    store = Store(server.config.store, read_only=True)
    tasks = store.tasks(finished.run, 1)
    store.close()
    assert [task.phase.value for task in tasks] == ["merged", "merged"]
    assert len(server.events_of(control.UpdateReceived)) == 2
    assert not refusals(server)


def test_a_silent_device_is_left_behind_at_the_deadline(url, config, running, fleet):
    """The round closes with its quorum; the silent device was nudged, is cancelled, and its late
    update is refused.
    """
    kept = {}

    def late(_peer, work):
        kept["work"] = work

    with Peer(fleet, "good", url, honest()), Peer(fleet, "slow", url, late) as slow:
        settings = {
            "min_devices": 2,
            "deadline_seconds": 3,
            "quorum": 0.5,
            "nudge_seconds": 1,
            "rounds": 2,
        }
        server = running(config(round=settings, evaluation={"data": None}), url)
        closed = server.wait_event(control.RoundClosed)
        assert closed.merged == {"good": "w1.00-d1"}
        assert closed.missing == ("slow",)
        assert closed.round_seconds >= 3
        slow.wait_for(lambda peer: peer.got(Cancel))
        assert len([offer for offer in slow.offers if offer.round == 1]) >= 2
        work = kept["work"]
        data = encode_weights(tensors_of(work), work.metadata())
        peer_done = slow.done(work, data)
        slow.upload(work.offer.task, data)
        slow.reply(peer_done)
        slow.wait_for(lambda peer: peer.got(UploadRefused))
        assert slow.got(UploadRefused)[0].reason is RefusalReason.LATE
        finished = server.wait()
    assert finished.rounds == 2
    assert refusals(server)["late"] >= 1


def test_a_round_without_quorum_is_abandoned_and_tried_again(url, config, running, fleet):
    """The reason is told and stored, the next round starts from the same version, and the run fails
    at the limit.
    """
    calls = []

    def only_later(peer, work):
        calls.append(work.offer)
        if len(calls) > 1:
            honest()(peer, work)
        else:
            peer.refuse(work, RefusalReason.BUSY, "charging")

    with Peer(fleet, "d", url, only_later):
        server = running(config(round={"retries": 2}, evaluation={"data": None}), url)
        finished = server.wait()
    abandoned = server.events_of(control.RoundAbandoned)[0]
    assert "0 of 1 updates with no more expected, 1 needed" in abandoned.reason
    assert "1 declined" in abandoned.reason
    assert abandoned.again
    assert finished.status == "finished"
    assert [event.round for event in server.events_of(control.RoundStarted)] == [1, 2]
    assert [offer.version for offer in calls] == [0, 0]
    refused = server.events_of(control.UpdateRefused)[0]
    assert (refused.by, refused.reason, refused.detail) == (
        "device",
        RefusalReason.BUSY,
        "charging",
    )


def test_a_run_fails_after_too_many_abandoned_rounds(url, config, running, fleet):
    """The run ends with the reason of the last round and an exit code, and the store says so."""
    with Peer(fleet, "d", url, lambda peer, work: peer.refuse(work, RefusalReason.FAILED)):
        server = running(config(round={"retries": 2}, evaluation={"data": None}), url)
        finished = server.wait()
    assert finished.status == "failed"
    assert finished.exit_code == 5
    assert "2 rounds in a row were abandoned" in finished.error
    assert [event.again for event in server.events_of(control.RoundAbandoned)] == [True, False]


def test_who_has_no_data_for_a_run_is_not_asked_again_before_it_comes_anew(
    url, config, running, fleet
):
    """It would decline as often as it is asked, and use up the retries of a run that has only to
    wait for it.
    """

    def nothing(peer, work):
        peer.refuse(work, RefusalReason.NO_DATA, "labels 0 to 7, and the model has 4 classes")

    settings = config(
        round={"retries": 2, "min_devices": 2, "quorum": 1.0}, evaluation={"data": None}
    )
    with Peer(fleet, "good", url, honest()) as good:
        with Peer(fleet, "bad", url, nothing):
            server = running(settings, url)
            server.wait_event(control.RoundAbandoned)
            changed = server.wait_event(control.FleetChanged)
        assert (changed.eligible, changed.needed) == (1, 2)
        with Peer(fleet, "bad", url, honest()):
            assert server.wait().status == "finished"
    assert len(server.events_of(control.RoundAbandoned)) == 1
    assert len(good.offers) == 2


def test_a_run_that_lacks_who_declined_says_so(url, config, running, fleet):
    """With its reason, where the operator looks."""
    settings = config(round={"wait_seconds": 1.0, "retries": 2}, evaluation={"data": None})
    with Peer(
        fleet,
        "bad",
        url,
        lambda peer, work: peer.refuse(work, RefusalReason.NO_DATA, "a label of 7"),
    ):
        finished = running(settings, url).wait()
    assert (
        "bad: declined, no-data: a label of 7; requested again when it has been restarted"
        in finished.error
    )


def test_a_run_without_devices_fails_with_what_to_look_at(url, config, running, fleet):
    """Nobody comes: the error says how many were there, how many are needed, and which tiers
    exist.
    """
    server = running(config(round={"wait_seconds": 0.5}), url)
    finished = server.wait()
    assert finished.status == "failed"
    assert "0 eligible devices after 0.5 s, 1 needed" in finished.error
    assert "w1.00-d1, w0.50-d1" in finished.error


def test_refused_chunks_name_the_device_of_their_task(url, config, running, fleet):
    """Chunks of a round that is over and damaged ones: their topic names no device."""
    kept = {}

    def late(peer, work):
        if kept:
            # The second round has begun: these are of the first.
            data = encode_weights(tensors_of(kept["work"]), kept["work"].metadata())
            peer.upload(kept["work"].offer.task, data)
            peer.link.publish(peer.topics.upload(work.offer.task, 0), b"GIF89a" + bytes(200))
            honest()(peer, work)
        kept.setdefault("work", work)

    with Peer(fleet, "good", url, honest()), Peer(fleet, "slow", url, late):
        rounds = {"min_devices": 2, "deadline_seconds": 3, "quorum": 0.5, "rounds": 2}
        server = running(config(round=rounds, evaluation={"data": None}), url)
        server.wait()
    store = Store(server.config.store, read_only=True)
    refused = [line for line in store.events() if line.kind == "update-refused"]
    counts = {(item.device, item.reason) for item in store.refusals()}
    store.close()
    assert {line.device for line in refused} == {"slow"}, refused
    assert {("slow", "late"), ("slow", "malformed")} <= counts
