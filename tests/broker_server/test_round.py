"""A round from the offers to a new global version, over real brokers, with devices that behave."""

from __future__ import annotations

import numpy as np
import pytest

from broker_server.store import Store, TaskPhase
from broker_server.tensors import open_tensors
from fleet_protocol import control
from tests.broker_server.artifacts import tiny_layout, tiny_weights
from tests.broker_server.peer import Peer, honest, profile


def test_a_round_merges_two_widths_and_judges_the_result(broker_url, config, running, fleet):
    """Each device gets the widest tier it declares; entries both hold are averaged, the rest come from the wide one."""
    with (
        Peer(fleet, "wide", broker_url, honest(1.0)),
        Peer(fleet, "narrow", broker_url, honest(3.0), profile=profile(max_width=0.5)),
    ):
        server = running(config(round={"min_devices": 2}), broker_url)
        finished = server.wait()
    assert finished.status == "finished", finished.error
    closed = server.of(control.RoundClosed)[0]
    assert closed.merged == {"wide": "w1.00-d1", "narrow": "w0.50-d1"}
    assert closed.evaluation.examples == 40
    before = tiny_weights(tiny_layout())
    store = Store(server.config.store, read_only=True)
    version = store.version(finished.run)
    after = open_tensors(server.config.store / "blobs" / "objects" / version.digest[:2] / version.digest)
    np.testing.assert_allclose(after["hidden.weight"][:4], before["hidden.weight"][:4] + 2, rtol=1e-6)
    np.testing.assert_allclose(after["hidden.weight"][4:], before["hidden.weight"][4:] + 1, rtol=1e-6)
    np.testing.assert_allclose(after["head.weight"][:, 4:], before["head.weight"][:, 4:] + 1, rtol=1e-6)
    assert {task.phase for task in store.tasks(finished.run, 1, "train")} == {TaskPhase.MERGED}
    assert closed.payload_bytes > 0
    assert closed.wire_bytes > closed.payload_bytes
    assert not server.of(control.UpdateRefused)
    store.close()


if __name__ == "__main__":
    pytest.main([__file__])
