"""Devices' accuracies on their own samples: the mean, and that of the worst tenth."""

from dataclasses import replace

import pytest

from broker_server.store import Store
from reproduction.measures import measure_named
from simulation.own_accuracy import Hits, mean_accuracy, worst_tenth
from simulation.results.history import read_devices
from simulation.runner import simulate
from simulation.settings import SimulationConfig
from tests.reproduction.test_rendering import row

OWN = {
    "seed": 3,
    "model": {"arch": "conv", "settings": {"channels": (4,)}},
    "data": {"name": "digits", "train_limit": 360, "test_limit": 120},
    "partition": {"kind": "shards", "per_device": 2},
    "evaluation": {"local": True},
    "devices": {"count": 12},
    "train": {"epochs": 1, "batch_size": 8, "learning_rate": 0.1},
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def run(out, cache, rounds, **tables):
    """What a simulation of some rounds gives, with a quarter of the devices in each."""
    tables = {**OWN, "round": {"rounds": rounds, "fraction": 0.25}, **tables}
    return simulate(SimulationConfig.model_validate({**tables, "out": out, "cache": cache}))


def test_a_tenth_is_rounded_up_and_its_devices_weigh_alike():
    """Of 11 devices two; the mean weighs them by their samples."""
    hits = [Hits(0.0, 10), Hits(50.0, 100), *[Hits(9.0, 10)] * 9]
    assert worst_tenth(hits) == 0.25
    assert worst_tenth(hits[:2]) == 0.0
    assert mean_accuracy(hits) == 131 / 200
    assert worst_tenth([]) is mean_accuracy([]) is None


def test_the_measure_is_read_at_the_best_round_of_the_mean():
    """As the mean is, so that both are of one model."""
    rows = [
        replace(row(1, local=0.5), local_worst_tenth=0.4),
        replace(row(2, local=0.9), local_worst_tenth=0.3),
        replace(row(3, local=0.8), local_worst_tenth=0.2),
    ]
    reading = measure_named("own-worst").read(rows, 2)
    assert (reading.best, reading.best_round, reading.last) == (30.0, 2, 20.0)
    assert reading.decides == 25.0


def test_one_model_is_judged_on_the_samples_of_each_device(cache, tmp_path):
    """The worst tenth of twelve devices are two, so they are below the mean."""
    last = run(tmp_path, cache, 1).rounds[-1]
    assert last.local_worst_tenth < last.local_accuracy


@pytest.mark.slow
def test_the_newest_accuracy_of_each_device_counts(cache, tmp_path):
    """Also of those that took part in earlier rounds alone, and if another process goes on."""
    run(tmp_path, cache, 2, private={"parts": ["head"]})
    result = run(tmp_path, cache, 4, private={"parts": ["head"]})
    newest = {}
    store = Store(tmp_path / "store", read_only=True)
    try:
        for closed in result.rounds:
            for task in store.tasks(result.run, closed.round):
                newest[task.device] = task.metrics.evaluation.accuracy
            lowest = sorted(newest.values())[: 2 if len(newest) > 10 else 1]
            assert closed.local_worst_tenth == pytest.approx(sum(lowest) / len(lowest))
    finally:
        store.close()
    assert len(newest) > 3  # a round has three devices
    assert {device.device for device in read_devices(tmp_path)} == set(newest)
