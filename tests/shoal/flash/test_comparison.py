"""The comparison at the end of `make arm`: the board's first update is there when its round has
ended.
"""

import numpy as np
import pytest

from broker_server.service.server import Server
from fleet_protocol import control
from tests.broker_server.peer import Peer, honest
from tests.shoal.flash.watch import Watch, joined, weights_of


def test_the_boards_update_outlives_its_round(config, url, fleet, tmp_path):
    """It is what the board sent, and not what was sent into the same file; the round learns what
    lies between.

    The board moves every weight by 3, the other device by 1, so that the version has moved by 2.
    """
    settings = config(
        round={"rounds": 2, "min_devices": 2, "quorum": 1.0}, robust={"norm_bound": 0}
    )
    watch = Watch(tmp_path / "store")
    broker = settings.broker.model_copy(update={"url": url})
    with (
        Server(settings.fleet, settings.store, broker, listener=watch) as server,
        Peer(fleet, "barn", url, honest(1.0)),
        Peer(fleet, "pi-1", url, honest(3.0)),
    ):
        assert server.run(settings).status == "finished"
    watch.wait(joined, 1, "the board")
    assert watch.count(control.UpdateReceived) == 4, "two of training and two of statistics"
    learnt = weights_of(tmp_path / "store")
    update = watch.update()
    assert set(update) & set(learnt)
    for name in set(update) & set(learnt):
        np.testing.assert_allclose(update[name], learnt[name] + 1.0, rtol=1e-5)


def test_what_never_comes_is_waited_for_to_the_end_of_the_run(tmp_path):
    """A run that ended without the event is not waited for."""
    watch = Watch(tmp_path / "store")
    watch(
        control.RunFinished(
            run="r",
            seconds=1.0,
            status="failed",
            version=0,
            rounds=0,
            wire_bytes=0,
            payload_bytes=0,
        )
    )
    with pytest.raises(TimeoutError, match="no board within 600 s"):
        watch.wait(joined, 600, "board")
