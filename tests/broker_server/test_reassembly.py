"""Chunks of updates: kept in any order, once, asked for where they are missing, and ignored
later.
"""

import time
from dataclasses import replace

import numpy as np
import pytest

from broker_server.rounds.artifacts import load_artifacts
from broker_server.rounds.collection_end import ClosingRule
from broker_server.rounds.planning import open_collection
from broker_server.rounds.run_context import prepare_run
from broker_server.service import reassembly as module
from broker_server.service.partial_uploads import PartialUploads
from broker_server.service.reassembly import QUIET_SECONDS, Reassembly, require_owner
from broker_server.store import TaskPhase, TaskRecord
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.blobs import blob_ref, encode_chunk
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.messages import BlobRef
from fleet_protocol.weights import encode_weights

CHUNK_BYTES = 1024
PADDING = "x" * 3 * CHUNK_BYTES  # so that an update has several chunks


@pytest.fixture
def arriving(config, artifacts, tmp_path):
    """A reassembly, an open task, and an update for it."""
    settings = config()
    loaded = load_artifacts(artifacts, settings.model.arch, chunk_bytes=CHUNK_BYTES)
    context = prepare_run("r", settings, loaded)
    tier = context.tiers[0]
    tensors = {spec.name: np.zeros(spec.shape, np.float32) for spec in tier.manifest.parameters}
    updates = BlobStore(tmp_path / "updates")
    blobs = BlobStore(tmp_path / "blobs")
    sent = BlobRef(digest=blobs.put(encode_weights(tensors)), size=10_000, chunk_bytes=CHUNK_BYTES)
    record = TaskRecord("t", "r", 1, "pi", "train", tier.tier.id, "k", 0, sent, sent)
    rule = ClosingRule(1.0, 1, 0.0, 1.0, 0.0, 0.0)
    task = open_collection(context, [record], rule).tasks["t"]
    metadata = {"task": "t", "run": "r", "round": "1", "version": "0", "tier": tier.tier.id}
    data = encode_weights(tensors, metadata | {"pad": PADDING})
    return Reassembly(PartialUploads(updates, blobs)), task, data


def frames_of(data):
    count = blob_ref(data, CHUNK_BYTES).chunks
    return [encode_chunk(data, index, CHUNK_BYTES) for index in range(count)]


def test_chunks_come_in_any_order_and_twice(arriving):
    """The announcement may come before, between or after them."""
    reassembly, task, data = arriving
    update = blob_ref(data, CHUNK_BYTES)
    *others, last = reversed(frames_of(data))
    assert reassembly.add_chunk(task, others[0]) is None
    assert reassembly.announce(task, update) is None
    for frame in others + others:
        assert reassembly.add_chunk(task, frame) is None
    outcome = reassembly.add_chunk(task, last)
    assert (outcome.kind, outcome.task, outcome.update) == ("stored", "t", update.digest)
    assert outcome.merged == update.digest
    assert reassembly.partial.blobs.read(update.digest) == data
    assert reassembly.next_due() == float("inf")


def test_chunks_after_an_update_is_complete_are_ignored(arriving):
    """Stored or refused: nothing of them is kept, unless the device announces an update anew."""
    reassembly, task, data = arriving
    update = blob_ref(data, CHUNK_BYTES)
    for frame in frames_of(data):
        reassembly.add_chunk(task, frame)
    assert reassembly.announce(task, update).kind == "stored"
    for finish in (lambda: None, lambda: reassembly.refuse(task)):
        finish()
        for frame in frames_of(data):
            assert reassembly.add_chunk(task, frame) is None
        assert reassembly.partial.missing("t", update) == ((0, update.chunks),)
    assert reassembly.announce(task, update) is None
    for frame in frames_of(data)[:-1]:
        reassembly.add_chunk(task, frame)
    assert reassembly.add_chunk(task, frames_of(data)[-1]).kind == "stored"


def test_chunks_of_an_answered_task_are_ignored(arriving):
    """A device that has declined its task may still send what was under way."""
    reassembly, task, data = arriving
    task.record = replace(task.record, phase=TaskPhase.DECLINED)
    reassembly.add_chunk(task, frames_of(data)[0])
    update = blob_ref(data, CHUNK_BYTES)
    assert reassembly.partial.missing("t", update) == ((0, update.chunks),)


def test_missing_chunks_are_asked_for_once_after_silence(arriving, monkeypatch):
    """Each chunk that comes puts it off; the device announces the update again afterwards."""
    reassembly, task, data = arriving
    update = blob_ref(data, CHUNK_BYTES)
    frames = frames_of(data)
    before = time.monotonic()
    reassembly.announce(task, update)
    due = reassembly.next_due()
    assert due >= before + QUIET_SECONDS
    monkeypatch.setattr(module, "QUIET_SECONDS", 10 * QUIET_SECONDS)
    reassembly.add_chunk(task, frames[1])
    assert reassembly.next_due() > due + QUIET_SECONDS
    assert reassembly.pop_overdue(due) == []
    (missing,) = reassembly.pop_overdue(reassembly.next_due())
    assert (missing.task, missing.update) == (task, update)
    assert missing.ranges == ((0, 1), (2, update.chunks))
    assert reassembly.pop_overdue(float("inf")) == []
    assert reassembly.add_chunk(task, frames[0]) is None


def test_a_damaged_update_is_received_anew(arriving):
    """Nothing of it stays, and chunks are kept again."""
    reassembly, task, data = arriving
    update = blob_ref(data, CHUNK_BYTES)
    for frame in frames_of(data[:-1] + bytes([data[-1] ^ 1])):
        reassembly.add_chunk(task, frame)
    outcome = reassembly.announce(task, update)
    assert (outcome.kind, outcome.update) == ("damaged", update.digest)
    assert reassembly.announce(task, update) is None
    for frame in frames_of(data)[:-1]:
        reassembly.add_chunk(task, frame)
    assert reassembly.add_chunk(task, frames_of(data)[-1]).kind == "stored"


def test_an_update_of_another_task_is_refused_and_nothing_of_it_is_kept(arriving):
    """Its outcome names the reason; later chunks of it are ignored."""
    reassembly, task, data = arriving
    task.record = replace(task.record, tier="w0.50-d1")
    update = blob_ref(data, CHUNK_BYTES)
    for frame in frames_of(data):
        reassembly.add_chunk(task, frame)
    outcome = reassembly.announce(task, update)
    assert (outcome.kind, outcome.reason) == ("refused", RefusalReason.UNKNOWN_TASK)
    assert not reassembly.partial.blobs.has(update.digest)
    assert reassembly.add_chunk(task, frames_of(data)[0]) is None
    assert reassembly.partial.missing("t", update) == ((0, update.chunks),)


def test_a_chunk_that_is_no_chunk_is_counted(arriving):
    """For its task: it then counts as missing."""
    reassembly, task, data = arriving
    outcome = reassembly.add_chunk(task, frames_of(data)[0][:-1])
    assert (outcome.kind, outcome.task) == ("counted", "t")
    assert outcome.reason is RefusalReason.MALFORMED


def test_an_announcement_is_forgotten_with_its_task(arriving):
    """Also where the task goes on in another collection, with another value of its own."""
    reassembly, task, data = arriving
    update = blob_ref(data, CHUNK_BYTES)
    reassembly.add_chunk(task, frames_of(data)[0])
    reassembly.announce(task, update)
    reassembly.keep_only({"t": task})
    assert reassembly.next_due() < float("inf")
    reassembly.keep_only({"t": replace(task)})
    assert reassembly.next_due() == float("inf")
    assert reassembly.partial.missing("t", update) == ((1, update.chunks),)
    reassembly.forget("t")
    assert reassembly.partial.missing("t", update) == ((0, update.chunks),)


def test_a_chunk_that_another_device_signed_is_refused(arriving):
    """A fleet without identities has no signers."""
    _, task, _ = arriving
    require_owner(task, None)
    require_owner(task, "pi")
    with pytest.raises(RefusedError, match="mallory sent chunks of the update of pi"):
        require_owner(task, "mallory")
