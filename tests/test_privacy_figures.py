"""The table of accuracies in `docs/privacy.md` is that of the stored runs, and each epsilon that of its noise."""

import json
from pathlib import Path

import pytest

from broker_server.settings.fleet import PrivacyConfig
from broker_server.store.privacy_spent import epsilon_after
from tests.simulation.privacy_figures import FILE, NOISES, SEEDS, TABLES

STORED = json.loads(FILE.read_text())
RUNS = {(run["noise_multiplier"], run["seed"]): run for run in STORED["runs"]}


def test_the_table_is_that_of_the_stored_runs():
    """Every noise and seed that was simulated, with the settings that the file was made with."""
    rows = [
        [cell.strip(" `") for cell in line.split("|")[1:-1]]
        for line in (Path(FILE).parent / "privacy.md").read_text().splitlines()
        if line.startswith("|") and line.count("|") == 4
    ]
    told = []
    for noise in NOISES:
        runs = [RUNS[noise, seed] for seed in SEEDS]
        name = "without" if noise is None else f"{noise:g}"
        epsilon = "" if noise is None else f"{runs[0]['epsilon']:g}"
        told.append([name, epsilon, ", ".join(f"{run['accuracy']:.4f}" for run in runs)])
    assert rows[2:] == told
    assert STORED["tables"] == json.loads(json.dumps(TABLES))


@pytest.mark.parametrize("noise", [noise for noise in NOISES if noise is not None])
def test_epsilon_is_that_of_every_device_in_every_round(noise):
    """All devices were asked in all rounds."""
    config = PrivacyConfig(clip=STORED["clip"], noise_multiplier=noise)
    expected = round(epsilon_after(config, TABLES["round"]["rounds"]), 2)
    assert {RUNS[noise, seed]["epsilon"] for seed in SEEDS} == {expected}


def test_what_hides_a_device_among_five_hundred_costs_little():
    """The mean over the seeds is within a point up to the noise of an epsilon of 18, and falls with more."""
    means = {noise: sum(RUNS[noise, seed]["accuracy"] for seed in SEEDS) / len(SEEDS) for noise in NOISES}
    assert abs(means[None] - means[1.0]) < 0.01
    assert means[1.0] > means[3.0] > means[10.0]
