"""A server and device processes over real brokers: they learn, and they live through what happens
to real fleets.
"""

import signal
import subprocess
import threading
from dataclasses import replace

import pytest

from fleet_protocol import control
from fleet_protocol.errors import RefusalReason, TransportError
from tests.brokers import embedded_broker, free_port, mosquitto_broker
from tests.fleet.boards import restart
from tests.fleet.conftest import WIDTHS, Watcher, run


@pytest.fixture(
    params=[mosquitto_broker, pytest.param(embedded_broker, marks=pytest.mark.slow)],
    ids=["mosquitto", "embedded"],
)
def broker(request, tmp_path):
    with request.param(tmp_path) as running:
        yield running


@pytest.fixture
def mosquitto(tmp_path):
    with mosquitto_broker(tmp_path) as running:
        yield running


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 100 kB, smaller than one artifact set."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_three_kinds_of_device_train_one_model(ground, broker):
    """Each device gets the widest tier it can hold, every update is merged, and the merged model
    gets better.
    """
    watcher = Watcher()
    with ground.fleet(broker.url) as fleet:
        finished = run(ground.config(broker.url, rounds=4), watcher)
        fleet.check()
    closed = watcher.events_of(control.RoundClosed)
    assert finished.status == "finished"
    assert [dict(event.merged) for event in closed] == [
        {f"device-{i}": tier for i, tier in enumerate(ground.tiers)}
    ] * 4
    assert closed[-1].evaluation.accuracy > 0.85
    assert (
        closed[-1].evaluation.accuracy
        > watcher.events_of(control.RoundJudged)[0].evaluation.accuracy
    )
    assert not watcher.events_of(control.UpdateRefused)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broker", "away_seconds"),
    [(mosquitto_broker, 20.0), (embedded_broker, 3.0)],
    indirect=["broker"],
    ids=["mosquitto-20s", "embedded-3s"],
)
def test_a_broker_that_dies_in_mid_round_costs_time_only(ground, broker, away_seconds):
    """The broker dies when the first device has accepted, loses all sessions, and comes back: no
    round is lost.
    """
    watcher = Watcher()
    timers = []

    def kill():
        broker.stop()
        timers.append(threading.Timer(away_seconds, broker.start))
        timers[0].start()

    watcher.once(lambda event: isinstance(event, control.DeviceAccepted) and event.round == 2, kill)
    with ground.fleet(broker.url) as fleet:
        finished = run(ground.config(broker.url, deadline_seconds=120.0, grace=60.0), watcher)
        fleet.check()
    timers[0].join()
    closed = watcher.events_of(control.RoundClosed)
    assert finished.status == "finished"
    assert [len(event.merged) for event in closed] == [len(WIDTHS)] * 3
    assert closed[1].round_seconds >= away_seconds


@pytest.mark.slow
def test_a_device_that_never_answers_holds_up_one_deadline(ground, mosquitto):
    """A frozen device is left out at the deadline, the quorum is merged, and it takes part again
    when it wakes.
    """
    watcher = Watcher()
    with ground.fleet(mosquitto.url) as fleet:
        frozen = fleet.processes["device-1"]
        watcher.once(
            lambda event: isinstance(event, control.RoundClosed) and event.round == 1,
            lambda: frozen.send_signal(signal.SIGSTOP),
        )
        watcher.once(
            lambda event: isinstance(event, control.RoundClosed) and event.round == 2,
            lambda: frozen.send_signal(signal.SIGCONT),
        )
        finished = run(ground.config(mosquitto.url, deadline_seconds=5.0, quorum=0.6), watcher)
    closed = watcher.events_of(control.RoundClosed)
    assert finished.status == "finished"
    assert closed[1].missing == ("device-1",)
    assert [len(event.merged) for event in closed] == [3, 2, 3]


@pytest.mark.slow
def test_a_device_killed_in_mid_round_comes_back_and_finishes(ground, mosquitto):
    """A board that loses power in a round is restarted and its update still enters that round."""
    watcher = Watcher()
    with ground.fleet(mosquitto.url) as fleet:

        def power_cut():
            restart(fleet, "device-0")

        watcher.once(
            lambda event: (
                isinstance(event, control.DeviceAccepted)
                and event.device == "device-0"
                and event.round == 2
            ),
            power_cut,
        )
        finished = run(ground.config(mosquitto.url, grace=60.0), watcher)
        fleet.check()
    assert finished.status == "finished"
    assert [len(event.merged) for event in watcher.events_of(control.RoundClosed)] == [3, 3, 3]


@pytest.mark.slow
def test_without_quorum_a_round_is_abandoned_and_the_run_says_so(ground, mosquitto):
    """When too few answer, nothing is merged: the round is abandoned with its reason, and the run
    fails in the end.
    """
    watcher = Watcher()
    with ground.fleet(mosquitto.url) as fleet:
        watcher.once(
            lambda event: isinstance(event, control.RoundStarted),
            lambda: [process.send_signal(signal.SIGSTOP) for process in fleet.processes.values()],
        )
        config = ground.config(mosquitto.url, deadline_seconds=1.0, retries=1)
        finished = run(config, watcher)
        for process in fleet.processes.values():
            process.send_signal(signal.SIGCONT)
    assert finished.status == "failed"
    assert finished.exit_code != 0
    assert finished.version == 0
    assert watcher.events_of(control.RoundAbandoned)


def test_a_server_without_a_broker_says_where_it_looked(ground):
    """The address is in the message, and it comes within the connect timeout."""
    config = ground.config(f"mqtt://127.0.0.1:{free_port()}")
    config = config.model_copy(
        update={"broker": config.broker.model_copy(update={"connect_timeout_seconds": 1.0})}
    )
    with pytest.raises(
        TransportError, match=r"cannot connect to the broker at mqtt://127\.0\.0\.1"
    ):
        run(config, Watcher())


@pytest.mark.slow
def test_a_full_disk_on_one_device_leaves_the_others_training(ground, mosquitto, small_disk):
    """A board whose state folder is full refuses with `no-space`, keeps running, and the round
    closes without it.
    """
    watcher = Watcher()
    first, *others = ground.devices()
    with ground.fleet(mosquitto.url, [replace(first, state_dir=small_disk), *others]) as fleet:
        finished = run(ground.config(mosquitto.url), watcher)
        fleet.check()
    assert finished.status == "finished"
    assert {event.reason for event in watcher.events_of(control.UpdateRefused)} == {
        RefusalReason.NO_SPACE
    }
    assert [len(event.merged) for event in watcher.events_of(control.RoundClosed)] == [2, 2, 2]
