"""A device process against a real broker and a scripted server: the protocol in motion, and what may go wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fleet_protocol.messages import Done, NeedChunks, Progress
from fleet_protocol.weights import decode_weights, read_metadata
from tests.brokers import TestBroker, embedded_broker, mosquitto_broker
from tests.device_runtime.device_process import DeviceProcess
from tests.device_runtime.scripted_server import ScriptedServer, scripted_server
from tests.device_runtime.tiny_set import TinySet, initial_weights, samples, write_tiny_set


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinySet:
    return write_tiny_set(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=[mosquitto_broker, embedded_broker], ids=["mosquitto", "embedded"])
def broker(request, tmp_path_factory) -> Iterator[TestBroker]:
    with request.param(tmp_path_factory.mktemp("broker")) as running:
        yield running


@contextlib.contextmanager
def running_device(tmp_path: Path, url: str, **options) -> Iterator[DeviceProcess]:
    x, y = samples(50)
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
    device_id = f"d-{tmp_path.name[-40:]}"
    with (
        scripted_server(broker.url, tiny.blobs) as server,
        running_device(tmp_path, broker.url, device=device_id, **options) as device,
    ):
        server.wait_state("idle", device_id)
        yield server, device


def test_a_task_from_offer_to_acknowledgement(tmp_path, broker, tiny):
    """Offer, blobs, training, upload, acknowledgement; then a statistics task and a second round in one session."""
    with fleet(tmp_path, broker, tiny) as (server, device):
        profile = server.statuses[-1].profile
        assert profile.examples == 45
        assert "onnx" in profile.backends
        weights = initial_weights()
        server.offer(device.id, tiny.choice(weights), round=3, task="t1")
        update = server.wait_update("t1")
        assert read_metadata(update) == {
            "task": "t1",
            "run": "run1",
            "round": "3",
            "version": "0",
            "tier": "w1.00-d1",
        }
        new = decode_weights(update)
        assert sorted(new) == sorted(weights)
        assert all(np.abs(new[name] - weights[name]).max() > 1e-3 for name in weights)
        done = server.wait_message(Done, "t1")
        assert (done.metrics.examples, done.metrics.batches, done.metrics.labels) == (45, 12, (0, 1, 2, 3))
        assert done.metrics.evaluation.examples == 5
        assert [m.epoch for m in server.heard(Progress, "t1")][-1] == 2
        server.offer(device.id, tiny.choice(new), round=3, task="t2", kind="statistics")
        statistics = decode_weights(server.wait_update("t2"))
        assert sorted(statistics) == ["stat.norm.mean", "stat.norm.var"]
        assert server.heard(Done, "t2")[0].metrics.batches == 6
        server.offer(device.id, tiny.choice(new), round=4, task="t3")
        server.wait_update("t3")
        manifest = tiny.choice(new).artifact_set.digest
        assert len([m for m in server.heard(NeedChunks) if m.digest == manifest]) == 1
        device.wait_log("the server has the update", times=3)
        assert device.terminate() == 0
        assert server.wait(lambda: not server.statuses[-1].online) is None
        chain = " ".join(device.states())
        assert chain == (
            "starting probing idle fetching training uploading dropping idle fetching measuring uploading dropping "
            "idle fetching training uploading dropping idle stopped"
        )
