"""A bench of light devices speaks the whole protocol with a real server, beside the bare broker."""

import numpy as np
import pytest

from fleet_protocol import messages
from fleet_protocol.blobs import blob_ref, decode_chunk, iter_chunks
from fleet_protocol.digests import matches
from fleet_protocol.mapped_tensors import blob_in
from fleet_protocol.topics import Topics
from fleet_protocol.weights import encode_weights
from shoal.bench.fleet import bench_fleet
from shoal.bench.light_device import light_client
from shoal.bench.settings import FleetBench
from tests.brokers import mosquitto_broker

UPDATE = 40_000


def test_light_devices_close_their_rounds(tmp_path):
    """Every update of every device is merged, and what the devices count is what was asked of
    them.
    """
    with mosquitto_broker(tmp_path) as broker:
        bench = FleetBench(6, 3, UPDATE, broker=broker.url, folder=tmp_path / "bench")
        figures = bench_fleet(bench)
    assert figures.merged == figures.asked == 2 * 6
    assert abs(figures.update_bytes - UPDATE) < 1000
    assert figures.bytes_by_kind["uploads sent"] >= 3 * 6 * figures.update_bytes
    assert figures.paho_seconds > 0
    assert 0 < figures.paho_cpu_ms_per_update < figures.cpu_ms_per_update


@pytest.mark.parametrize("chunk_bytes", [1024, 50_000])
def test_devices_of_one_process_send_the_update_that_they_announce(chunk_bytes, monkeypatch):
    """Chunks that devices share, and those that are sent again, make up an update of each device's
    own.
    """
    weights = encode_weights({"w": np.arange(3000, dtype=np.float32)})
    ref = blob_ref(weights, chunk_bytes)
    whole: dict[str, bytes] = {}
    for name in ("a", "b"):
        member = light_client(Topics("lab"), name, whole)
        sent: list[tuple[str, bytes]] = []
        monkeypatch.setattr(
            member, "publish", lambda topic, payload, sent=sent, **_: sent.append((topic, payload))
        )
        offer = messages.Offer(
            fleet="lab",
            run="r",
            round=1,
            task=f"task-{name}",
            version=0,
            choices=(messages.TierChoice(tier="w1.00-d1", artifact_set=ref, weights=ref),),
            train=messages.TrainSettings(learning_rate=0.1, epochs=1, batch_size=1, seed=0),
            seconds_left=60,
        )
        member.behaviour.on_message(member.topics.task(name), offer.to_bytes())
        for index, frame in iter_chunks(weights, chunk_bytes, ((0, ref.chunks),)):
            member.behaviour.on_message(member.topics.blob(ref.digest, index), frame)
        done = messages.parse_device_message(sent[-1][1])
        assert isinstance(done, messages.Done)
        every = ((0, done.update.chunks),)
        again = messages.UploadMissing(fleet="lab", run="r", round=1, task=offer.task, ranges=every)
        for _ in range(2):
            chunks = [decode_chunk(frame) for topic, frame in sent if "/uploads/" in topic]
            data = b"".join(chunk.payload for chunk in chunks)
            assert matches(data, done.update.digest)
            assert blob_in(data)[0]["task"] == offer.task
            sent.clear()
            member.behaviour.on_message(member.topics.task(name), again.to_bytes())
