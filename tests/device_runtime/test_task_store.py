"""The task record, the recovery map and the cache of blobs."""

import json
import time

import pytest

from device_runtime.agent.cache import Cache
from device_runtime.agent.machine import Event
from device_runtime.agent.task_store import (
    CRASH_LIMIT,
    OUTAGE_LIMIT,
    StoredTask,
    TaskStore,
    resume_event,
)
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.blobs import blob_ref
from fleet_protocol.messages import Offer, TaskMetrics, TierChoice, TrainSettings

METRICS = TaskMetrics(
    examples=1, batches=1, labels=(0,), fetch_seconds=0, train_seconds=0, resident_bytes=0
)


def make_record(**changes) -> StoredTask:
    ref = blob_ref(b"some bytes", 1024)
    offer = Offer(
        fleet="lab",
        run="r",
        round=1,
        task="t",
        version=0,
        choices=(TierChoice(tier="w1.00-d1", artifact_set=ref, weights=ref),),
        train=TrainSettings(learning_rate=0.1, epochs=1, batch_size=1, seed=0),
        seconds_left=60,
    )
    values = {
        "phase": "fetching",
        "offer": offer,
        "tier": "w1.00-d1",
        "deadline_unix": time.time() + 60,
    }
    return StoredTask.model_validate(values | changes)


def test_a_record_survives_the_disk(tmp_path):
    """What was saved is what is loaded; what was cleared is gone."""
    store = TaskStore(tmp_path)
    assert store.load() == (None, None)
    record = make_record(
        phase="uploading", update=blob_ref(b"update", 1024), metrics=METRICS, crashes=2
    )
    store.save(record)
    assert store.load() == (record, None)
    store.clear()
    assert store.load() == (None, None)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", json.dumps({"version": 2}).encode()])
def test_an_unreadable_record_is_set_aside(tmp_path, text):
    """A damaged record, or one of a newer version, is kept for a look and does not stop the
    device.
    """
    store = TaskStore(tmp_path)
    store.path.write_bytes(text)
    record, problem = store.load()
    assert record is None
    assert "unreadable" in problem
    assert store.path.with_suffix(".unreadable").read_bytes() == text
    assert store.load() == (None, None)


@pytest.mark.parametrize(
    ("changes", "event"),
    [
        ({"phase": "fetching"}, Event.RESUME_FETCH),
        ({"phase": "training"}, Event.RESUME_FETCH),
        ({"phase": "measuring"}, Event.RESUME_FETCH),
        (
            {"phase": "uploading", "update": blob_ref(b"here", 1024), "metrics": METRICS},
            Event.RESUME_UPLOAD,
        ),
        (
            {"phase": "uploading", "update": blob_ref(b"gone", 1024), "metrics": METRICS},
            Event.RESUME_FETCH,
        ),
        ({"phase": "training", "deadline_unix": 0.0}, Event.RESUME_EXPIRED),
        ({"phase": "training", "crashes": CRASH_LIMIT - 1}, Event.RESUME_FETCH),
        ({"phase": "training", "crashes": CRASH_LIMIT}, Event.RESUME_POISONED),
        ({"phase": "training", "crashes": CRASH_LIMIT, "deadline_unix": 0.0}, Event.RESUME_EXPIRED),
        ({"phase": "training", "outages": OUTAGE_LIMIT - 1}, Event.RESUME_FETCH),
        ({"phase": "training", "outages": OUTAGE_LIMIT}, Event.RESUME_POISONED),
    ],
)
def test_the_recovery_map(tmp_path, changes, event):
    """Every saved phase leads to one place."""
    blobs = BlobStore(tmp_path)
    blobs.put(b"here")
    assert resume_event(make_record(**changes), blobs) is event


def test_nothing_on_disk_is_nothing_to_do(tmp_path):
    """Without a record the device is ready."""
    assert resume_event(None, BlobStore(tmp_path)) is Event.READY


def test_a_clock_that_jumps_back_does_not_stretch_the_deadline():
    """A board without a clock battery wakes up in 1970; the offer still lasts no longer than it
    said.
    """
    assert make_record().seconds_left(now_unix=0.0) == 60


def test_eviction_keeps_current_previous_and_what_is_in_use(tmp_path):
    """Two generations of weights and the known sets stay; older weights, finished updates and old
    parts go.
    """
    blobs = BlobStore(tmp_path)
    cache = Cache(tmp_path, blobs, 10**6)
    manifest, graph, update = (blobs.put(name.encode()) for name in ("manifest", "graph", "update"))
    weights = [blobs.put(f"weights {i}".encode()) for i in range(4)]
    for digest in weights:
        cache.add_used(manifest, [graph], digest, {})
    part = blobs.part(blob_ref(b"never finished", 1024))
    part.close()
    cache.evict({update})
    assert [blobs.has(digest) for digest in weights] == [False, False, True, True]
    assert blobs.has(manifest)
    assert blobs.has(graph)
    assert blobs.has(update)
    assert not list((tmp_path / "parts").iterdir())
    cache.evict(())
    assert not blobs.has(update)
    assert Cache(tmp_path, blobs, 10**6).index == cache.index


def test_the_bound_takes_the_oldest_sets_and_never_what_is_in_use(tmp_path):
    """Over the bound, weights go before sets and old sets before new ones."""
    blobs = BlobStore(tmp_path)
    cache = Cache(tmp_path, blobs, 2500)
    sets = []
    for i in range(3):
        manifest, graph, weights = (blobs.put(f"{kind} {i}".encode().ljust(500)) for kind in "mgw")
        cache.add_used(manifest, [graph], weights, {})
        sets.append((manifest, graph, weights))
    cache.evict(())
    assert [blobs.has(manifest) for manifest, _, _ in sets] == [False, True, True]
    assert not any(blobs.has(weights) for _, _, weights in sets)
    cache.evict(sets[2], everything=True)
    assert [blobs.has(manifest) for manifest, _, _ in sets] == [False, False, True]


def test_a_passed_self_test_is_remembered_per_graph_and_runtime(tmp_path):
    """Another runtime version, or another set, is tested again."""
    cache = Cache(tmp_path, BlobStore(tmp_path), 10**6)
    cache.add_used("m1", ["g"], "w", {})
    cache.mark_tested("m1", "onnx/train 1.20")
    again = Cache(tmp_path, BlobStore(tmp_path), 10**6)
    assert again.tested("m1") == {"onnx/train 1.20"}
    assert not again.tested("m2")


def test_what_a_killed_process_was_writing_goes(tmp_path):
    """Its file has no digest for a name, and once ended the agent each time that it looked at its
    cache.
    """
    blobs = BlobStore(tmp_path / "blobs")
    digest = blobs.put(b"known")
    left = blobs.path(digest).with_name(f".{digest}.x1y2z3")
    left.write_bytes(b"half")
    Cache(tmp_path, blobs, 10**6).evict({digest})
    assert not left.exists()
    assert blobs.path(digest).read_bytes() == b"known"
