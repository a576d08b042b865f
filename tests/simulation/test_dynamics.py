"""Conditions that change: chains as specification 4.6 has them, the same for every method, known
before a choice.
"""

from collections import Counter
from itertools import pairwise

import pytest

from device_runtime.training.choosers.adaptive import Progress, choose
from fleet_protocol.errors import ConfigError
from fleet_protocol.sizing import SizingConstants
from simulation.clock import Load, load_clock
from simulation.clock_settings import ClockConfig, DynamicsConfig
from simulation.dynamics import Conditions
from simulation.results.history import read_devices
from simulation.runner import simulate
from tests.simulation.simulations import settings

STRONG = {"loads": (1.0, 2.0, 4.0), "links": ("wifi", "lte", 15.0)}
RESTLESS = {**STRONG, "stay": 0.2}
CONSTANTS = {"efficiency": "reciprocal_of_sum", "theta": 4.0, "gamma": 1.0, "arm": "system"}
LINK = "lte"


def conditions(seed=1, devices=3, **dynamics):
    clock = load_clock(ClockConfig(dynamics=DynamicsConfig(**dynamics)))
    return Conditions(clock, [clock.device("Nano", LINK)] * devices, seed)


def test_nothing_changes_by_default():
    """The times of a simulation without the table are those of before."""
    static = conditions()
    clock = load_clock(ClockConfig())
    assert {static.clock_of(index, number) for index in range(3) for number in range(1, 50)} == {
        clock.device("Nano", LINK)
    }


@pytest.mark.parametrize("stay", [0.8, 0.25, 1.0])
def test_a_chain_stays_as_often_as_it_says_and_moves_to_each_other_value_alike(stay):
    """Over 6,000 rounds of loads and of links; all values are as likely where a chain starts."""
    chain = conditions(**STRONG, stay=stay)
    seen = [chain.clock_of(0, number) for number in range(1, 6001)]
    for values in ([moment.slowdown for moment in seen], [moment.mbps for moment in seen]):
        kept = sum(now == after for now, after in pairwise(values)) / 5999
        assert kept == pytest.approx(stay, abs=0.03)
        moves = Counter((now, after) for now, after in pairwise(values) if now != after)
        assert len(moves) == (6 if stay < 1 else 0)
        assert all(
            count == pytest.approx(5999 * (1 - stay) / 6, rel=0.3) for count in moves.values()
        )
    many = conditions(devices=3000, **STRONG)
    for values in zip(
        *(
            (each.slowdown, each.mbps)
            for each in (many.clock_of(index, 1) for index in range(3000))
        ),
        strict=True,
    ):
        assert all(count == pytest.approx(1000, rel=0.1) for count in Counter(values).values())


def test_a_device_meets_the_same_whoever_asks_and_in_whatever_order():
    """The seed and the number of the device decide; changing links do not change the loads."""
    forward = conditions(**STRONG)
    backward = conditions(**STRONG)
    met = {
        (index, number): forward.clock_of(index, number)
        for index in range(3)
        for number in range(1, 40)
    }
    assert {key: backward.clock_of(*key) for key in reversed(met)} == met
    loads = conditions(loads=STRONG["loads"])
    assert all(loads.clock_of(*key).slowdown == moment.slowdown for key, moment in met.items())
    assert all(loads.clock_of(*key).mbps == 20 for key in met)

    def trace(seed, index):
        return [conditions(seed, **STRONG).clock_of(index, number) for number in range(1, 40)]

    assert trace(1, 0) != trace(1, 1)
    assert trace(1, 0) != trace(2, 0)


@pytest.mark.parametrize(
    ("dynamics", "named"),
    [({"links": ("wify",)}, "wify"), ({"links": (-1.0,)}, "-1"), ({"links": (0,)}, "0")],
)
def test_a_link_that_there_is_not_is_refused(dynamics, named):
    """Before anything is simulated, with what there is."""
    with pytest.raises(ConfigError, match=named):
        conditions(**dynamics)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory, cache):
    """Rows of the devices of a simulation whose conditions rarely stay."""

    def run(strategy):
        tables = {
            "round": {"rounds": 4, "fraction": 1.0},
            "train": {"steps": 2, "batch_size": 8, "epochs": 1},
            "tiers": {"assign": "capacity", "levels": None},
            "devices": {"count": 6, "types": [{"type": "RaspberryPi4", "link": "bluetooth"}]},
            "clock": {"dynamics": RESTLESS},
        }
        result = simulate(
            settings(tmp_path_factory.mktemp("run") / "out", cache, strategy=strategy, **tables)
        )
        return result, read_devices(result.folder)

    return run


@pytest.mark.slow
def test_devices_choose_by_the_conditions_of_the_round_and_need_the_time_of_the_round(simulated):
    """Width and seconds of every device and round are those of the chains; a round lasts as long as
    its slowest.
    """
    result, rows = simulated({"name": "whalefl", "whalefl": CONSTANTS})
    clock = load_clock(ClockConfig(dynamics=DynamicsConfig(**RESTLESS)))
    chain = Conditions(clock, [clock.device("RaspberryPi4", "bluetooth")] * 6, seed=3)
    constants = SizingConstants(**CONSTANTS)
    ids = sorted({row.device for row in rows})
    assert len(rows) == 24
    for row in rows:
        moment = chain.clock_of(ids.index(row.device), row.round)
        choice = choose(
            Progress(training_efficiency=constants.neutral),
            constants,
            transmit_seconds=clock.upload_seconds(moment, Load(1.0)),
            compute_seconds=clock.compute_seconds(moment, Load(0.25, 8, 2)),
            maximum=1.0,
        )
        width = max(0.25, choice.width)
        assert row.tier.startswith(f"w{width:.2f}"), row
        assert row.simulated_seconds == pytest.approx(
            clock.device_seconds(moment, Load(width, 8, 2))
        )
    assert len({row.tier for row in rows}) == 3
    for round_row in result.rounds:
        assert round_row.simulated_seconds == max(
            row.simulated_seconds for row in rows if row.round == round_row.round
        )


@pytest.mark.slow
def test_every_method_meets_the_same_conditions(simulated):
    """Common random numbers: where another method trains the same width in the same round, it takes
    as long.
    """
    _, chosen = simulated({"name": "whalefl", "whalefl": CONSTANTS})
    _, fixed = simulated({"name": "heterofl"})
    times = {(row.round, row.device): row.simulated_seconds for row in fixed}
    common = [row for row in chosen if row.tier.startswith("w1.00")]
    assert {row.tier for row in fixed} == {"w1.00-d1"}
    assert common
    assert all(times[row.round, row.device] == row.simulated_seconds for row in common)
