"""Noise in a simulation follows from the seed, hides what it does in a fleet, and its epsilon is in
the history.
"""

from dataclasses import replace

import pytest

from broker_server.settings.privacy import PrivacyConfig
from broker_server.store.privacy_spent import epsilon_after
from shoal.cli.simulating import print_rounds
from simulation.results.history import read_history
from simulation.results.rounds import RoundRow
from simulation.runner import simulate
from tests.simulation.simulations import settings, tensors

TABLES = {
    "model": {"arch": "mlp", "settings": {"hidden": (16,)}, "widths": (1.0, 0.5)},
    "devices": {"count": 4},
    "round": {"rounds": 2, "fraction": 0.5},
    "train": {"epochs": 1},
    "tiers": {"assign": "fix", "levels": "a1-b1"},
    "evaluation": {"every": 2},
    "engine": {"workers": 1},
    "robust": {"norm_bound": 0},
}


@pytest.mark.slow
@pytest.mark.parametrize("where", ["central", "local"])
def test_noise_follows_from_the_seed(where, tmp_path, cache):
    """Twice the same bits, others without noise; a device that was asked twice has spent what the
    history says.
    """
    hidden = {"privacy": {"clip": 0.5, "noise_multiplier": 0.01, "where": where}}
    less = {"privacy": {**hidden["privacy"], "noise_multiplier": 1e-6}}
    runs = {
        name: simulate(settings(tmp_path / name, cache, **TABLES, **tables))
        for name, tables in {"one": hidden, "again": hidden, "less": less}.items()
    }
    one, again, other = (tensors(run.folder, run.run)[-1] for run in runs.values())
    assert all((one[name] == again[name]).all() for name in one)
    assert all((one[name] != other[name]).mean() > 0.9 for name in one)
    rows = read_history(runs["one"].folder)
    config = PrivacyConfig(**hidden["privacy"])
    assert rows[0].epsilon == epsilon_after(config, 1)
    assert rows[1].epsilon in {epsilon_after(config, 1), epsilon_after(config, 2)}
    assert (rows[0].train_loss is None) == (where == "local")


def test_the_line_of_a_simulation_has_its_epsilon(capsys):
    """Where something hides a device's part, and not elsewhere."""
    row = RoundRow(1, 1, 0.5, 1.0, None, 3, {}, 1.0, 1.0, 1.0, 10, None)
    print_rounds([row], "plain")
    assert "epsilon" not in capsys.readouterr().out
    print_rounds([row, replace(row, round=2, epsilon=17.8566)], "hidden")
    assert "17.86" in capsys.readouterr().out
