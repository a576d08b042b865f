"""Three of ten devices lie: the plain mean is lost, robust settings stay within a point of the run
without liars.
"""

import pytest

from broker_server.store import Store, TaskPhase
from simulation import runner
from tests.simulation.attackers import LyingEngine, times
from tests.simulation.simulations import settings

LIARS = ("device-0", "device-4", "device-7")
TABLES = {
    "model": {"arch": "mlp", "settings": {}, "widths": (1.0,)},
    "data": {"name": "digits", "train_limit": 1000, "test_limit": None},
    "partition": {"kind": "iid"},
    "devices": {"count": 10},
    "round": {"rounds": 10, "fraction": 1.0},
    "train": {"epochs": 2, "batch_size": 16, "learning_rate": 0.05},
    "tiers": {"assign": "capacity", "levels": None},
    "evaluation": {"every": 10},
}
UNBOUND = {"norm_bound": 0}
TRIMMED = {**UNBOUND, "merge": "trimmed_mean", "faulty": 0.3}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory, cache):
    """Runs with liars; what was computed once is not computed again."""
    honest_engine = runner.open_engine
    known = {}

    def simulate(factor, robust):
        key = (factor, tuple(robust.items()))
        if key in known:
            return known[key]
        attacks = dict.fromkeys(LIARS, times(factor))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                runner,
                "open_engine",
                lambda table, setup: LyingEngine(
                    honest_engine(table, setup), setup.updates.parent, attacks
                ),
            )
            config = settings(
                tmp_path_factory.mktemp("out") / "run", cache, **TABLES, robust=robust
            )
            known[key] = runner.simulate(config)
        return known[key]

    return simulate


def accuracy(result):
    assert result.finished.status == "finished", result.finished.error
    return result.finished.evaluation.accuracy


@pytest.mark.parametrize(
    ("factor", "robust"),
    [
        pytest.param(
            -10,
            {**UNBOUND, "merge": "krum", "faulty": 0.3},
            id="flipped, krum",
            marks=pytest.mark.slow,
        ),
        pytest.param(-10, {}, id="flipped, default", marks=pytest.mark.slow),
        pytest.param(50, {}, id="scaled, default", marks=pytest.mark.slow),
        pytest.param(
            50,
            {"norm_bound": 2, "beyond_norm": "clip"},
            id="scaled, clipped",
            marks=pytest.mark.slow,
        ),
        pytest.param(50, TRIMMED, id="scaled, trimmed mean", marks=pytest.mark.slow),
        pytest.param(
            50, {**UNBOUND, "merge": "median"}, id="scaled, median", marks=pytest.mark.slow
        ),
    ],
)
def test_three_liars_of_ten_cost_less_than_a_point(factor, robust, simulated):
    """Digits, ten rounds: the mean falls below one in three, the robust run stays with the clean
    one.
    """
    clean = accuracy(simulated(1, UNBOUND))
    assert clean > 0.9
    assert accuracy(simulated(factor, UNBOUND)) < 1 / 3
    assert accuracy(simulated(factor, robust)) >= clean - 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    "robust", [{**UNBOUND, "merge": "median"}, TRIMMED], ids=["median", "trimmed_mean"]
)
def test_statistics_of_entries_learn_more_slowly_than_without_liars(robust, simulated):
    """Flipped values push what is trimmed to one side: the model learns all the same, behind the
    run without liars.
    """
    assert accuracy(simulated(-10, robust)) > 0.85


@pytest.mark.slow
def test_the_liars_are_named_and_no_longer_asked(simulated):
    """With the default bound: refused in three rounds, then in quarantine until the end."""
    result = simulated(50, {})
    store = Store(result.folder / "store", read_only=True)
    refused = [
        task.device
        for number in (1, 2, 3)
        for task in store.tasks(result.run, number)
        if task.phase is TaskPhase.REFUSED
    ]
    assert sorted(refused) == sorted(LIARS * 3)
    assert {task.device for task in store.tasks(result.run, 4)}.isdisjoint(LIARS)
    assert set(store.rounds(result.run)[3].left_out.reasons) == set(LIARS)
    store.close()
