"""Further tiers of a simulation are evaluated beside the whole model, with the recipe's metrics."""

from collections import Counter
from dataclasses import replace

import pytest
from pydantic import ValidationError

from fleet_protocol.errors import ConfigError
from models.registry import Registry, infer_layout
from models.tier import Tier
from reproduction.measures import measure_named
from reproduction.sizes import mean_sizes
from simulation.results.history import read_history
from simulation.runner import simulate
from tests.simulation.simulations import settings

MODEL = {"arch": "mlp", "settings": {"hidden": (16,)}, "recipe": {"metrics": ["f1"]}}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Six rounds in which the half model is evaluated, too."""
    folder = tmp_path_factory.mktemp("tiers")
    config = settings(
        folder / "run",
        folder / "cache",
        model=MODEL,
        evaluation={"tiers": ["w0.50-d1", "w1.00-d1"]},
        round={"rounds": 6, "fraction": 1.0},
    )
    return simulate(config)


def test_each_tier_has_its_figures_in_every_evaluated_round(run):
    """Those of the whole model are the same beside it; the half has others; files keep them."""
    for row in run.rounds:
        assert row.tier_metrics is not None
        assert set(row.tier_metrics) == {
            "w0.50-d1 accuracy", "w0.50-d1 f1", "w1.00-d1 accuracy", "w1.00-d1 f1",
        }  # fmt: skip
        assert row.tier_metrics["w1.00-d1 accuracy"] == row.accuracy
        assert row.tier_metrics["w1.00-d1 f1"] == row.metrics["f1"]
    assert any(row.tier_metrics["w0.50-d1 f1"] != row.metrics["f1"] for row in run.rounds)
    assert read_history(run.folder) == run.rounds


def test_measures_read_tiers_and_metrics(run):
    """Figures of tables by tier and metric, times 100; the mean of the last evaluations decides."""
    rows = run.rounds
    half = measure_named("global-at-w0.50-d1").read(rows, len(rows))
    shares = [row.tier_metrics["w0.50-d1 accuracy"] for row in rows]
    assert half.decides == pytest.approx(100 * sum(shares) / len(shares))
    assert half.best == pytest.approx(100 * max(shares))
    whole = measure_named("metric-f1").read(rows, 1)
    assert whole.decides == whole.last == pytest.approx(100 * rows[-1].metrics["f1"])
    by_tier = measure_named("metric-f1-at-w1.00-d1")
    assert by_tier.read(rows, 1) == whole
    assert by_tier.title == "f1 x 100 of w1.00-d1"
    assert measure_named("metric-f1-at-w0.25-d1").read(rows, 1) is None
    with pytest.raises(ConfigError, match=r"metric-f1-at-w1\.00-d2"):
        measure_named("metrics-f1")


def test_a_falling_metric_is_best_where_it_is_lowest(run):
    rows = run.rounds
    values = [3.0, 2.0, 5.0, 4.0, 3.0, 6.0]
    changed = []
    for row, value in zip(rows, values, strict=True):
        changed.append(replace(row, metrics={"perplexity": value}))
    reading = measure_named("metric-perplexity").read(changed, 1)
    assert (reading.best, reading.best_round) == (2.0, 2)


def with_tiers(rows, tiers):
    """The rounds as if devices had trained these tiers."""
    return [replace(row, tiers=tiers) for row in rows]


def test_the_sizes_of_a_run_are_means_over_its_updates(run):
    """By the manifests of the tiers that devices trained."""
    arch = Registry.zoo().get("mlp")
    layout = infer_layout(arch, {**MODEL["settings"], "input_shape": (1, 8, 8)})
    updates = sum((Counter(row.tiers) for row in run.rounds), Counter())
    assert len(updates) > 1
    total = sum(count * layout.parameter_count(Tier.parse(tier)) for tier, count in updates.items())
    sizes = mean_sizes(run.rounds, run.artifacts)
    assert sizes.parameters == total / updates.total()
    assert sizes.mebibytes == sizes.parameters * 4 / 2**20
    whole = mean_sizes(with_tiers(run.rounds, {"w1.00-d1": 3}), run.artifacts)
    # Twice the products of a forward pass.
    assert whole.flops == 2 * (64 * 16 + 16 * 10)
    assert mean_sizes([], run.artifacts) is None


def test_tiers_need_a_model_of_the_server(tmp_path):
    tables = {"private": {"parts": ["head"]}, "evaluation": {"tiers": ["w0.50-d1"]}}
    with pytest.raises((ConfigError, ValidationError), match="devices keep parts of the model"):
        settings(tmp_path, tmp_path, **tables)


def test_tiers_that_cannot_be_judged_are_refused_before_the_export(tmp_path):
    """Devices return those of one tier only."""
    norms = {"settings": {"channels": (4, 8), "norm": "sbn"}}
    config = settings(tmp_path, tmp_path, model=norms, evaluation={"tiers": ["w0.50-d1"]})
    with pytest.raises(ConfigError, match=r'evaluation\.statistics = "server-batch"'):
        simulate(config)
    config = settings(tmp_path, tmp_path, evaluation={"tiers": ["w0.75-d1"]})
    with pytest.raises(ConfigError, match=r"w0\.75-d1 is not exported; the tiers are w1\.00-d1"):
        simulate(config)
