"""Tables from histories: what is written, and what is left out."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace

import pytest

from reproduction.catalogue import find_experiment
from reproduction.figures import compared, figures, mean_and_spread, reached
from reproduction.measures import GLOBAL, LOCAL, OWN, PERPLEXITY, ROUNDS_TO_BEST, Reading, hours_to
from reproduction.report import as_csv, as_markdown, plain, write_table
from reproduction.running import ArmResult
from simulation.results.history import RoundRow


def row(number, accuracy=None, *, local=None, perplexity=None, total=0.0):
    return RoundRow(
        round=number,
        version=number,
        accuracy=accuracy,
        loss=None,
        train_loss=0.5,
        devices=2,
        tiers={"w1.00-d1": 2},
        simulated_seconds=1.0,
        simulated_total=total,
        seconds=30.0,
        payload_bytes=10,
        local_accuracy=local,
        perplexity=perplexity,
    )


def result(table, arm, seed, rows, scale="small"):
    found = find_experiment(table).arm(arm)
    return ArmResult(found, found.config(scale, seed), tuple(rows), {"python": "3.11", "shoal": "0"}, "test, 2 cores")


def test_the_best_round_is_read_and_the_last_beside_it():
    """Rounds that were not evaluated do not count; of equal rounds the first is the best."""
    rows = [
        row(1),
        row(2, 0.5, local=0.9),
        row(3, 0.7, local=0.6),
        row(4, 0.7, local=0.8),
        row(5, 0.6, local=0.7),
        row(6),
    ]
    assert GLOBAL.read(rows) == Reading(70.0, 3, 60.0)
    assert LOCAL.read(rows) == Reading(60.0, 3, 70.0)  # at the best global round
    assert OWN.read(rows) == Reading(90.0, 2, 70.0)  # at its own
    assert ROUNDS_TO_BEST.read(rows) == Reading(3.0, 3, None)
    assert GLOBAL.read([row(1)]) is None
    assert LOCAL.read([row(1, 0.5)]) is None


def test_an_accuracy_of_zero_is_a_figure():
    """It is not taken for a missing one."""
    assert GLOBAL.read([row(1, 0.0, local=0.0)]) == Reading(0.0, 1, 0.0)
    assert LOCAL.read([row(1, 0.0, local=0.0)]) == Reading(0.0, 1, 0.0)


def test_the_lowest_perplexity_is_the_best():
    rows = [row(1, 0.1, perplexity=7.0), row(2, 0.2, perplexity=3.0), row(3, 0.3, perplexity=4.5)]
    reading = PERPLEXITY.read(rows)
    assert reading is not None
    assert reading.best == 3.0
    assert reading.best_round == 2
    assert reading.last == 4.5


def test_the_time_to_a_target():
    """Hours of simulated time to the end of the first round that reaches it; none if no round does."""
    rows = [row(1, 0.5, total=1800.0), row(2, 0.9, total=3600.0), row(3, 0.95, total=7200.0)]
    assert hours_to(90.0).read(rows) == Reading(1.0, 2, None)
    assert hours_to(99.0).read(rows) == Reading(None, None, None)
    assert hours_to(99.0).read([row(1)]) is None


def test_spread_needs_two_seeds_and_all_values():
    assert mean_and_spread([1.0, 3.0]) == (2.0, pytest.approx(math.sqrt(2)))
    assert mean_and_spread([1.0]) == (1.0, None)
    assert mean_and_spread([1.0, None]) == (None, None)
    assert mean_and_spread([]) == (None, None)


@pytest.fixture
def rolex():
    """Two arms with three seeds, one of them with only two."""
    runs = []
    for arm, accuracies in (("federated-dropout", (0.20, 0.22, 0.24)), ("fedrolex", (0.30, 0.34))):
        for seed, accuracy in enumerate(accuracies, 1):
            rows = [row(10, accuracy - 0.1), row(20, accuracy), row(30, accuracy - 0.05)]
            runs.append(result("fedrolex-3", f"{arm}/cifar10-high", seed, rows))
    return runs


def test_arms_are_compared_on_the_seeds_they_share(rolex):
    experiment = find_experiment("fedrolex-3")
    (item,) = compared(experiment, figures(rolex))
    assert item.by_seed == {1: pytest.approx(10.0), 2: pytest.approx(12.0)}
    assert item.mean == pytest.approx(11.0)
    assert item.published == pytest.approx(69.44 - 46.64)
    assert item.holds is True


def test_a_table_has_what_was_run_and_names_the_rest(rolex):
    """Arms, every seed, mean and spread, published figures, differences, command; and no row of what was not run."""
    experiment = find_experiment("fedrolex-3")
    text = as_markdown(experiment, "small", rolex, plots=["p.png"])
    assert "2 of 24 arms run" in text
    lines = [line for line in text.splitlines() if line.startswith("| fedrolex/cifar10-high |")]
    assert "69.44 ± 1.50 | 32.00 ± 2.83 | 1: 30.00, 2: 34.00 | 27.00 ± 2.83" in lines[0]
    assert not any(line.startswith("| heterofl/") for line in text.splitlines())
    assert "heterofl/cifar10-high" in text.partition("Not run:")[2].partition("\n")[0]
    assert "| `round.rounds` | 3200 |" in text
    assert "![p.png](p.png)" in text
    assert (
        "shoal reproduce fedrolex-3 --scale small --seeds 1,2,3 --only"
        " federated-dropout/cifar10-high,fedrolex/cifar10-high" in text
    )
    assert "Real time of all rounds together: 7.5 min." in text
    assert "test, 2 cores; python 3.11, shoal 0" in text


def test_other_data_than_the_papers_is_said_to_be_other_data():
    """At the scale smoke no published figure compares."""
    run = result("heterofl-1", "a/iid", 1, [row(1, 0.5)], scale="smoke")
    assert "**digits stands for mnist" in as_markdown(find_experiment("heterofl-1"), "smoke", [run])
    run = result("heterofl-1", "a/iid", 1, [row(1, 0.5)])
    assert "stands for" not in as_markdown(find_experiment("heterofl-1"), "small", [run])


def test_a_target_that_was_not_reached_is_said_to_be_so():
    experiment = find_experiment("whalefl-1")
    runs = [
        result("whalefl-1", "whalefl/non-iid-2", 1, [row(1, 0.91, total=900.0)]),
        result("whalefl-1", "heterofl/non-iid-2", 1, [row(1, 0.92, total=1800.0)]),
        result("whalefl-1", "fedavg/non-iid-2", 1, [row(1, 0.5, total=3600.0)]),
    ]
    found = {
        (item.comparison.left, item.comparison.right): item
        for item in compared(experiment, figures(runs))
        if item.comparison.measure == hours_to(90.0).name
    }
    shared = found["whalefl/non-iid-2", "heterofl/non-iid-2"]
    assert shared.by_seed == {1: pytest.approx(0.5)}
    assert shared.holds is True
    assert shared.published == pytest.approx(0.82 / 0.98)
    missed = found["whalefl/non-iid-2", "fedavg/non-iid-2"]
    assert missed.by_seed == {1: None}
    assert missed.holds is None
    assert "not reached" in as_markdown(experiment, "small", runs)


def test_milestones_hold_or_not():
    experiment = find_experiment("heterofl-1")
    run = result("heterofl-1", "a-b-c-d-e/iid", 1, [row(5, 0.98), row(10, 0.986), row(15, 0.992), row(40, 0.9905)])
    early, late = reached(experiment, "small", [run])
    assert (early.by_seed[1], early.holds) == (pytest.approx(98.6), True)
    assert (late.by_seed[1], late.holds) == (pytest.approx(99.2), True)
    poor = result("heterofl-1", "a-b-c-d-e/iid", 1, [row(40, 0.99)])
    assert [item.holds for item in reached(experiment, "small", [poor])] == [False, False]
    assert reached(experiment, "small", [result("heterofl-1", "a/iid", 1, [row(5, 0.9)])]) == ()


def test_comma_separated_values_can_be_read_back(rolex):
    """One line for each figure and seed."""
    lines = list(csv.DictReader(io.StringIO(as_csv(find_experiment("fedrolex-3"), "small", rolex))))
    assert len(lines) == 5
    assert lines[-1]["arm"] == "fedrolex/cifar10-high"
    assert lines[-1]["seed"] == "2"
    assert float(lines[-1]["best"]) == 34.0
    assert lines[-1]["best_round"] == "20"
    assert float(lines[-1]["published"]) == 69.44
    assert float(lines[-1]["seconds"]) == 90.0


def test_json_has_the_same_figures(rolex):
    values = plain(find_experiment("fedrolex-3"), "small", rolex)
    assert values["arms_run"] == 2
    assert values["figures"][1]["mean"] == pytest.approx(32.0)
    assert values["comparisons"][0]["holds"] is True


def test_files_are_written(rolex, tmp_path):
    """Markdown, CSV and a plot; one more plot where a table is about time."""
    written = write_table(find_experiment("fedrolex-3"), "small", rolex, tmp_path / "new")
    assert [path.name for path in written.paths] == ["fedrolex-3.md", "fedrolex-3.csv", "fedrolex-3-accuracy.png"]
    assert all(path.stat().st_size for path in written.paths)
    run = result("whalefl-1", "fedavg/non-iid-2", 1, [row(1, 0.5, total=36.0), row(2, 0.6, total=72.0)])
    written = write_table(find_experiment("whalefl-1"), "small", [run], tmp_path)
    assert [path.name for path in written.plots] == ["whalefl-1-accuracy.png", "whalefl-1-time.png"]


def test_each_quantity_has_a_plot_of_its_own(tmp_path):
    """A table is plotted by what it prints: CoLA by its correlation, SST-2 by accuracy; nothing else is."""
    cola = result("inclusivefl-2", "inclusivefl/cola", 1, [replace(row(1, 0.69), matthews=0.1)])
    sst2 = result("inclusivefl-2", "inclusivefl/sst2", 1, [row(1, 0.8)])
    experiment = find_experiment("inclusivefl-2")
    both = write_table(experiment, "small", [cola, sst2], tmp_path / "both").plots
    assert [path.name for path in both] == ["inclusivefl-2-matthews.png", "inclusivefl-2-accuracy.png"]
    one = write_table(experiment, "small", [sst2], tmp_path / "one").plots
    assert [path.read_bytes() for path in one] == [both[1].read_bytes()]
    assert "![inclusivefl-2-matthews.png]" in (tmp_path / "both" / "inclusivefl-2.md").read_text()
