"""Boards that are connected and say nothing: a halted one holds nobody up, one that trains long is
waited for.
"""

import contextlib
import signal
from dataclasses import replace

import numpy as np
import pytest

from broker_server.store import Store
from broker_server.store.machine import RoundEvent
from fleet_protocol import control
from fleet_protocol.messages.presence import ALIVE_SECONDS
from tests.brokers import mosquitto_broker
from tests.fleet.conftest import WIDTHS, Watcher, run

pytestmark = pytest.mark.slow


@pytest.fixture
def mosquitto(tmp_path):
    with mosquitto_broker(tmp_path) as running:
        yield running


def last_round(config, finished):
    with contextlib.closing(Store(config.store, read_only=True)) as store:
        record = store.last_round(finished.run)
        return record, {
            task.device: task for task in store.tasks(record.run, record.number, "train")
        }


def with_samples(ground, times):
    """The devices, of which the last has so many times its samples."""
    *others, last = ground.devices()
    data = np.load(last.data)
    path = ground.folder / "many.npz"
    np.savez(path, **{name: np.concatenate([data[name]] * times) for name in ("x", "y")})
    return [*others, replace(last, data=path)]


def test_a_halted_board_is_waited_for_as_one_that_is_gone(ground, mosquitto):
    """The broker takes half a minute to find it dead; the round ends long before, with what came of
    the others.
    """
    watcher = Watcher()
    with ground.fleet(mosquitto.url) as fleet:
        halted = fleet.processes["device-2"]
        watcher.once(
            lambda event: isinstance(event, control.DeviceAccepted) and event.device == "device-2",
            lambda: halted.send_signal(signal.SIGSTOP),
        )
        config = ground.config(mosquitto.url, rounds=1, deadline_seconds=300.0, quorum=0.6)
        config = config.model_copy(
            update={"train": config.train.model_copy(update={"epochs": 400})}
        )
        finished = run(config, watcher)
    record, tasks = last_round(config, finished)
    assert record.ending is RoundEvent.REST_AWAY
    slowest = max(tasks[name].timing.answered for name in ("device-0", "device-1"))
    assert record.collect_seconds <= max(1.5 * slowest, 4 * ALIVE_SECONDS)


def trained_long(ground, broker, times):
    """A round in which the last device says nothing for an epoch of so many times its samples."""
    ground = replace(ground, folder=ground.folder / f"times-{times}")
    ground.folder.mkdir()
    watcher = Watcher()
    with ground.fleet(broker, with_samples(ground, times)) as fleet:
        rounds = {
            "rounds": 1,
            "deadline_seconds": 300.0,
            "nudge_seconds": 300.0,
            "quorum": 0.6,
            "grace": 0.0,
        }
        config = ground.config(broker, **rounds)
        config = config.model_copy(
            update={"train": config.train.model_copy(update={"epochs": 1, "batch_size": 1})}
        )
        finished = run(config, watcher)
        fleet.check()
    return *last_round(config, finished), watcher


def test_a_board_whose_epoch_takes_long_is_waited_for(ground, mosquitto):
    """It has nothing to tell for a long time, and says that it is there; a fast machine gets more
    samples.
    """
    for times in (100, 600, 3600):
        record, tasks, watcher = trained_long(ground, mosquitto.url, times)
        if tasks["device-2"].timing.answered > 4 * ALIVE_SECONDS:
            break
    assert tasks["device-2"].timing.answered > 4 * ALIVE_SECONDS
    assert record.ending is RoundEvent.ANSWERED
    assert len(watcher.events_of(control.RoundClosed)[0].merged) == len(WIDTHS)
