"""Tables from histories: what is written, and what is left out."""

import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from scipy import stats

from fleet_protocol.errors import ConfigError, DataError
from reproduction.by_seed import mean_and_spread
from reproduction.claim_result import OUT_OF_REACH as REACH
from reproduction.claim_result import REPEATED, VERDICTS
from reproduction.figures import figures, judge
from reproduction.figures_json import to_json
from reproduction.measures import measure_named
from reproduction.plain_measures import GLOBAL, LOCAL, OWN, PERPLEXITY, ROUNDS_TO_BEST
from reproduction.readings import Reading
from reproduction.report import writing
from reproduction.report.cells import claim_cells
from reproduction.report.drawing import draw
from reproduction.report.markdown import as_markdown
from reproduction.report.overview import chart, in_words, totals
from reproduction.report.writing import write_index, write_rows, write_table
from reproduction.running import ArmResult
from reproduction.sizes import Sizes
from reproduction.stored import as_csv, read_points, read_rows, rows_of, stated
from reproduction.table_file import TABLES, find_experiment
from simulation.results.rounds import RoundRow


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
    arm_of_table = find_experiment(table).arm(arm)
    return ArmResult(
        arm_of_table,
        arm_of_table.config(scale, seed),
        tuple(rows),
        {"python": "3.11", "shoal": "0"},
        "test, 2 cores",
    )


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
    assert GLOBAL.read(rows, 1) == Reading(70.0, 3, 60.0, 60.0)
    assert GLOBAL.read(rows, 2) == Reading(70.0, 3, 60.0, pytest.approx(65.0))
    assert GLOBAL.read(rows, 9) == Reading(70.0, 3, 60.0, pytest.approx(62.5))
    assert LOCAL.read(rows, 1) == Reading(60.0, 3, 70.0, 70.0)  # at the best global round
    assert OWN.read(rows, 1) == Reading(90.0, 2, 70.0, 70.0)  # at its own
    own = [
        *rows[:5],
        row(6, local=0.95),
    ]  # personal models are judged in every round, FedAvg's where that is due
    assert OWN.read(own, 2) == Reading(90.0, 2, 70.0, pytest.approx(75.0))
    assert OWN.read([row(1, local=0.2), row(2, local=0.3)], 1) == Reading(
        30.0, 2, 30.0, 30.0
    )  # nothing else is judged
    assert ROUNDS_TO_BEST.read(rows, 2) == Reading(3.0, 3, None)
    assert measure_named("global-by-2").read(rows, 2) == Reading(50.0, 2, None)
    assert GLOBAL.read([row(1)], 1) is None
    assert LOCAL.read([row(1, 0.5)], 1) is None


def test_an_unknown_measure_is_an_error():
    for name in ("globl", "hours-", "global-by-x"):
        with pytest.raises(
            ConfigError, match=rf"unknown measure '{name}'; choose from global, local"
        ):
            measure_named(name)


def test_an_accuracy_of_zero_is_a_figure():
    """It is not taken for a missing one."""
    assert GLOBAL.read([row(1, 0.0, local=0.0)], 1) == Reading(0.0, 1, 0.0, 0.0)
    assert LOCAL.read([row(1, 0.0, local=0.0)], 1) == Reading(0.0, 1, 0.0, 0.0)


def test_the_lowest_perplexity_is_the_best():
    rows = [row(1, 0.1, perplexity=7.0), row(2, 0.2, perplexity=3.0), row(3, 0.3, perplexity=4.5)]
    reading = PERPLEXITY.read(rows, 2)
    assert reading is not None
    assert reading.best == 3.0
    assert reading.best_round == 2
    assert reading.last == 4.5
    assert reading.decides == 3.75


def test_the_time_to_a_target():
    """Hours of simulated time to the end of the first round that reaches it; none if no round
    does.
    """
    rows = [row(1, 0.5, total=1800.0), row(2, 0.9, total=3600.0), row(3, 0.95, total=7200.0)]
    assert measure_named("hours-90").read(rows, 1) == Reading(1.0, 2, None)
    assert measure_named("hours-99").read(rows, 1) == Reading(None, None, None)
    assert measure_named("hours-99").read([row(1)], 1) is None


def test_accuracy_for_what_was_spent():
    """At the last evaluations within so many bytes or simulated seconds; none where the run ended
    before.
    """
    rows = [
        replace(row(number, 0.1 * number), payload_bytes=1_000_000, simulated_seconds=60.0)
        for number in range(1, 6)
    ]
    reading = measure_named("global-mb-3.5").read(rows, 2)
    assert reading is not None
    assert (reading.best_round, reading.last, reading.decides) == (
        3,
        pytest.approx(30.0),
        pytest.approx(25.0),
    )
    assert measure_named("global-seconds-120").read(rows, 2) == Reading(
        20.0, 2, 20.0, pytest.approx(15.0)
    )
    assert measure_named("global-seconds-301").read(rows, 2) == Reading(None, None, None)
    assert measure_named("global-mb-0.5").read(rows, 2) is None


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


def found_in(table, runs, scale="small"):
    experiment = find_experiment(table)
    return experiment, rows_of(experiment, scale, runs)


def verdicts(table, runs):
    """Of the claims that were run, by arms and measure."""
    experiment, rows = found_in(table, runs)
    return {
        (judged.claim.left, judged.claim.right, judged.claim.measure): judged
        for judged in judge(experiment, rows)
        if judged.by_seed and judged.claim.says
    }


def test_arms_are_compared_on_the_seeds_they_share(rolex):
    (judged,) = verdicts("fedrolex-3", rolex).values()
    assert judged.by_seed == {1: pytest.approx(10.0), 2: pytest.approx(12.0)}
    assert judged.published == pytest.approx(69.44 - 46.64)
    # Two seeds: the deviation is the root of 2, and so is the root of their number.
    half = stats.t.ppf(0.975, 1) * math.sqrt(2) / math.sqrt(2)
    assert judged.interval == pytest.approx((11.0, 11.0 - half, 11.0 + half))
    assert judged.verdict == REPEATED  # in fedrolex-repeat


def test_a_best_round_that_is_the_last_says_nothing():
    """A longer run may have a later one: 1.00 in all seeds decides nothing, and is marked."""
    runs = [
        result("inclusivefl-4", f"{arm}/sst2", seed, [row(1, 0.5), row(2, last)])
        for arm in ("inclusivefl", "without-distillation")
        for seed, last in ((1, 0.6), (2, 0.6), (3, 0.4))
    ]
    (judged,) = verdicts("inclusivefl-4", runs).values()
    assert set(judged.by_seed.values()) == {1.0}
    assert (judged.censored, judged.need, judged.verdict) == ((1, 2), None, "undecided")
    cells = claim_cells(judged)
    assert cells["by seed"] == "1: 1.00 (censored), 2: 1.00 (censored), 3: 1.00"
    assert cells["needs"] == "longer runs"


def test_a_claim_that_eight_hours_do_not_decide_is_out_of_reach():
    """Its spread is large beside what the paper prints, +5.54: more than 8 hours of runs."""
    spread = ((0.20, 0.30), (0.30, 0.20), (0.20, 0.20))
    runs = []
    for seed, accuracies in enumerate(spread, 1):
        for arm, accuracy in zip(("fedrolex", "heterofl"), accuracies, strict=True):
            slow = [replace(row(150, accuracy), seconds=900.0)]
            runs.append(result("fedrolex-3", f"{arm}/cifar10-high", seed, slow))
    (judged,) = verdicts("fedrolex-3", runs).values()
    assert judged.verdict == "out of reach here"
    # The quickest run of an arm counts: other work on the machine slows the others.
    quick = []
    for run in runs:
        seconds = 9.0 if run.seed == 2 else 900.0
        quick.append(replace(run, rows=tuple(replace(r, seconds=seconds) for r in run.rows)))
    (judged,) = verdicts("fedrolex-3", quick).values()
    assert judged.verdict == "undecided"
    assert judged.seconds == 18.0
    assert (
        claim_cells(judged)["needs"]
        == f"{judged.need.seeds} seeds, {judged.need.seconds / 60:.1f} min"
    )


def test_a_claim_without_a_published_size_is_planned_at_its_measured_size():
    """0.1 points beside a spread of 0.3 leave it undecided; what is decided needs no seeds."""
    runs = []
    for seed, gain in enumerate((-0.002, 0.001, 0.004), 1):
        for arm, accuracy in (("fedrolex", 0.2 + gain), ("federated-dropout", 0.2)):
            slow = [replace(row(150, accuracy), seconds=900.0)]
            runs.append(result("fedrolex-gamma", f"{arm}/gamma-8", seed, slow))
    (judged,) = verdicts("fedrolex-gamma", runs).values()
    assert judged.published is None
    assert judged.verdict == "undecided"
    assert claim_cells(judged)["needs"].endswith(" h at the measured size")
    decided = []
    for run in runs:
        gain = 0.1 if run.arm.name.startswith("fedrolex") else 0.0
        decided.append(replace(run, rows=(replace(run.rows[0], accuracy=0.2 + gain),)))
    (judged,) = verdicts("fedrolex-gamma", decided).values()
    assert (judged.verdict, claim_cells(judged)["needs"]) == ("holds", "-")


def test_an_undecided_claim_names_the_table_that_repeats_it():
    """What its own seeds decide stays decided."""

    def judged(fedrolex):
        runs = []
        for seed, accuracy in enumerate((0.20, 0.23, 0.18), 1):
            for arm, value in (("fedrolex", fedrolex), ("federated-dropout", accuracy)):
                name = f"{arm}/cifar10-high"
                runs.append(result("fedrolex-3", name, seed, [row(150, value)]))
        (judged,) = verdicts("fedrolex-3", runs).values()
        return judged.verdict, claim_cells(judged)["needs"]

    assert judged(0.22) == (REPEATED, "see `fedrolex-repeat`")
    assert judged(0.40)[0] == "holds"


def test_a_claim_that_was_not_run_states_the_time_of_its_seeds(monkeypatch):
    """Six runs of 1.5 hours are beyond eight hours; without a cost nothing is known."""
    hour = {"fedrolex/cifar10-high": 5400.0, "heterofl/cifar10-high": 5400.0}
    monkeypatch.setattr("reproduction.figures.seconds_on_two_cores", lambda *_: hour)
    judged = judge(find_experiment("fedrolex-3"), ())
    by_name = {result.claim.says: result for result in judged}
    known = by_name["FedRolex is above HeteroFL, cifar10, high heterogeneity"]
    assert (known.verdict, claim_cells(known)["needs"]) == (REACH, "3 seeds, 9.00 h")
    unknown = by_name["FedRolex is above HeteroFL, cifar10, low heterogeneity"]
    assert (unknown.verdict, claim_cells(unknown)["needs"]) == ("not run", "-")


def test_one_published_number_for_both_arms_is_no_difference():
    """Table 1 of FML has one row for FML, whichever way alpha and beta are set."""
    published = {}
    for judged in judge(find_experiment("fml-fedprox"), ()):
        published[judged.claim.says] = judged.published
    fixed = "FML is better with changing alpha and beta than with fixed ones, global model, iid"
    assert published[fixed] is None
    above = "FML's global model is above FedProx's, fml-dynamic, iid"
    assert published[above] == pytest.approx(0.35)


def test_who_stops_at_the_seed_that_suits_has_decided_nothing():
    """Two of three stated seeds would do for the interval; what is missing is said where the seeds
    are.
    """
    runs = [
        result("fedrolex-3", f"{arm}/cifar10-high", seed, [row(150, accuracy)])
        for arm, accuracies in (("federated-dropout", (0.20, 0.22)), ("fedrolex", (0.300, 0.321)))
        for seed, accuracy in enumerate(accuracies, 1)
    ]
    (judged,) = verdicts("fedrolex-3", runs).values()
    assert judged.interval[1] > 0
    assert (judged.lacking, judged.verdict) == ((3,), REPEATED)
    assert claim_cells(judged)["by seed"] == "1: +10.00, 2: +10.10, 3: not run"
    runs += [
        result("fedrolex-3", f"{arm}/cifar10-high", 3, [row(150, accuracy)])
        for arm, accuracy in (("federated-dropout", 0.24), ("fedrolex", 0.34))
    ]
    (judged,) = verdicts("fedrolex-3", runs).values()
    assert (judged.lacking, judged.verdict) == ((), "holds")


def test_what_is_stated_after_a_run_is_said_to_be_so(rolex):
    """Whoever changes what decides, and writes the table again, judges runs that are older."""
    experiment, rows = found_in("fedrolex-3", rolex)
    assert "changed after" not in as_markdown(experiment, rows)
    now = stated(experiment, "small")
    _, rows = found_in(
        "fedrolex-3",
        [replace(rolex[0], stated="0dd00dd0"), *(replace(r, stated=now) for r in rolex[1:])],
    )
    text = f"The statement was changed after 1 of the 5 runs: it was 0dd00dd0, and is {now}."
    assert text in as_markdown(experiment, rows)


def test_a_run_that_diverged_has_no_number_of_rounds_to_its_best_value():
    """0 rounds would be the best figure of all runs."""
    rows = [replace(row(number), matthews=value) for number, value in ((1, 0.4), (2, math.nan))]
    assert ROUNDS_TO_BEST.read(rows, 1) == Reading(None, None, None)


def test_a_model_that_diverged_has_no_figure_at_its_end():
    """An infinite perplexity is no number of a table, and the best round before decides nothing."""
    rows = [
        replace(row(1), perplexity=80.0),
        replace(row(2), perplexity=math.inf),
        replace(row(3), perplexity=math.nan),
    ]
    assert PERPLEXITY.read(rows[:2], 2) == PERPLEXITY.read(rows, 1) == Reading(None, None, None)
    assert PERPLEXITY.read([*rows, replace(row(4), perplexity=70.0)], 1) == Reading(
        70.0, 4, 70.0, 70.0
    )
    _, stored = found_in("heterofl-3", [result("heterofl-3", "e/iid", 1, rows)])
    assert [
        (stored_row.best, stored_row.decides)
        for stored_row in stored
        if stored_row.figure == "perplexity"
    ] == [(None, None)]


@pytest.mark.parametrize(
    ("left", "verdict"),
    [
        ((0.30, 0.32, 0.34), "holds"),
        ((0.10, 0.12, 0.14), "does not hold"),
        # Three seeds that do not decide: another table states the claim again.
        ((0.20, 0.25, 0.22), REPEATED),
        ((0.30,), REPEATED),
        ((0.20, 0.22, 0.24), REPEATED),  # equal: nothing is above
    ],
)
def test_a_claim_holds_where_all_of_the_interval_is_beyond_its_bound(left, verdict):
    """Of FedRolex above Federated Dropout, which has 20, 22 and 24 %; one seed decides nothing."""
    runs = [
        result("fedrolex-3", f"{arm}/cifar10-high", seed, [row(150, accuracy)])
        for arm, accuracies in (("federated-dropout", (0.20, 0.22, 0.24)), ("fedrolex", left))
        for seed, accuracy in enumerate(accuracies, 1)
    ]
    (judged,) = verdicts("fedrolex-3", runs).values()
    assert judged.verdict == verdict


def test_what_was_not_run_is_said_to_be_so():
    experiment = find_experiment("fedrolex-3")
    results = judge(experiment, ())
    assert {judged.verdict for judged in results if judged.claim.says} == {"not run"}
    assert {judged.verdict for judged in results if not judged.claim.says} == {""}


def test_a_table_has_what_was_run_and_names_the_rest(rolex):
    """Arms, every seed, mean and spread, published figures, differences, command; and no row of
    what was not run.
    """
    experiment, rows = found_in("fedrolex-3", rolex)
    text = as_markdown(experiment, rows, plots=["p.png"])
    assert "This page shows the 2 of 24 arms that were run." in text
    lines = [line for line in text.splitlines() if line.startswith("| fedrolex/cifar10-high |")]
    # Of each run the mean of the last evaluations is 5 points below the best.
    assert (
        "69.44 ± 1.50 | 27.00 ± 2.83 | 1: 25.00, 2: 29.00 | 32.00 ± 2.83 | 27.00 ± 2.83" in lines[0]
    )
    assert (
        "FedRolex is above Federated Dropout, cifar10, high heterogeneity | repeated | > 0 |"
        in text
    )
    assert not any(line.startswith("| heterofl/") for line in text.splitlines())
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
    assert "**digits stands for mnist" in as_markdown(*found_in("heterofl-1", [run], "smoke"))
    runs = [
        result("heterofl-1", "a-b-c-d-e/iid", seed, [row(1, accuracy)], "smoke")
        for seed, accuracy in ((1, 0.5), (2, 0.51))
    ]
    results = judge(*found_in("heterofl-1", runs, "smoke"))
    assert [judged.verdict for judged in results if judged.by_seed] == ["undecided", "undecided"]
    run = result("heterofl-1", "a/iid", 1, [row(1, 0.5)])
    assert "stands for" not in as_markdown(*found_in("heterofl-1", [run]))


def test_a_target_that_was_not_reached_is_said_to_be_so():
    """Ratios are tested by their logarithms: 0.5 and 0.5 * 1.2 make sqrt(0.3)."""
    runs = [
        result(
            "whalefl-1",
            f"{arm}/non-iid-2",
            seed,
            [row(1, accuracy, total=total * (1.2 if seed == 4 else 1))],
        )
        for seed in (3, 4)
        for arm, accuracy, total in (("whalefl", 0.91, 900.0), ("fedavg", 0.5, 3600.0))
    ]
    runs += [
        result("whalefl-1", "heterofl/non-iid-2", seed, [row(1, 0.92, total=1800.0)])
        for seed in (3, 4)
    ]
    judged_by_claim = verdicts("whalefl-1", runs)
    shared = judged_by_claim["whalefl/non-iid-2", "heterofl/non-iid-2", "hours-90"]
    assert shared.by_seed == {3: pytest.approx(0.5), 4: pytest.approx(0.6)}
    half = 12.7062 * math.log(1.2) / 2
    assert shared.interval == pytest.approx(
        [math.sqrt(0.3) * math.exp(x) for x in (0, -half, half)]
    )
    assert shared.published == pytest.approx(0.82 / 0.98)
    assert claim_cells(shared)["best round"] == claim_cells(shared)["ours, 95 %"][:4] == "0.55"
    missed = judged_by_claim["whalefl/non-iid-2", "fedavg/non-iid-2", "hours-90"]
    assert missed.by_seed == {3: None, 4: None}
    assert missed.bounds == {3: "< 0.25", 4: "< 0.25"}  # FedAvg's runs ended after 1 and 1.2 hours
    assert missed.verdict == "undecided"
    assert "not reached" in as_markdown(*found_in("whalefl-1", runs))


def test_the_spread_of_the_same_arms_counts_before_that_of_others():
    """Times to 80 and 70 % plan those to 90 %, which no run reached; all classes vary less."""
    runs = []
    for seed, factor in ((3, 1.0), (4, 3.0), (5, 0.5)):
        for arm, total in (("whalefl", 900.0 * factor), ("heterofl", 900.0)):
            rows = [row(1, 0.85, total=total)]
            runs.append(result("whalefl-1", f"{arm}/non-iid-2", seed, rows))
        for arm, total in (("whalefl", 900.0 + factor), ("heterofl", 900.0)):
            rows = [row(1, 0.91, total=total)]
            runs.append(result("whalefl-1", f"{arm}/iid", seed, rows))
    judged = verdicts("whalefl-1", runs)["whalefl/non-iid-2", "heterofl/non-iid-2", "hours-90"]
    spread = np.std(np.log([1.0, 3.0, 0.5]), ddof=1)
    assert judged.comparable == pytest.approx((spread, spread))
    # The published ratio of 0.84 is close to the bound of 0.85.
    assert judged.need.is_least
    assert judged.need.seeds is None or judged.need.seeds > 1000


def test_seeds_that_were_not_stated_decide_nothing(rolex):
    """Who adds seeds until a claim holds has not tested it; they stand in the table alone."""
    more = [
        replace(run, config=run.config.model_copy(update={"seed": 3 + run.seed})) for run in rolex
    ]
    experiment, rows = found_in("fedrolex-3", [*rolex, *more])
    assert {row.seed for row in rows} == {1, 2, 3, 4, 5, 6}
    assert judge(experiment, rows) == judge(*found_in("fedrolex-3", rolex))
    assert "1: 25.00, 2: 29.00, 4: 25.00, 5: 29.00" in as_markdown(experiment, rows)


def test_a_figure_of_one_arm_is_held_against_a_number():
    """Five levels by rounds 10 and 40."""
    runs = [
        result(
            "heterofl-1",
            "a-b-c-d-e/iid",
            seed,
            [row(5, 0.98), row(10, best), row(15, 0.992), row(40, 0.9905)],
        )
        for seed, best in ((1, 0.986), (2, 0.9861), (3, 0.9862))
    ]
    judged_by_claim = verdicts("heterofl-1", runs)
    early, late = (
        judged_by_claim["a-b-c-d-e/iid", "", f"global-by-{number}"] for number in (10, 40)
    )
    assert early.by_seed == {
        1: pytest.approx(98.6),
        2: pytest.approx(98.61),
        3: pytest.approx(98.62),
    }
    assert (early.verdict, late.verdict) == ("holds", "holds")
    assert late.by_seed[1] == pytest.approx(99.2)
    early_end = [result("heterofl-1", "a-b-c-d-e/iid", 1, [row(10, 0.986), row(15, 0.992)])]
    assert verdicts("heterofl-1", early_end)["a-b-c-d-e/iid", "", "global-by-40"].by_seed == {
        1: None
    }


def test_comma_separated_values_can_be_read_back(rolex, tmp_path):
    """One line for each figure and seed; those of an earlier version lack the newer columns."""
    _, rows = found_in("fedrolex-3", rolex)
    (tmp_path / "t.csv").write_text(as_csv(rows))
    assert read_rows(tmp_path / "t.csv") == rows
    assert len(rows) == 5
    assert (rows[-1].best, rows[-1].best_round, rows[-1].decides, rows[-1].published) == (
        34.0,
        20,
        29.0,
        69.44,
    )
    (tmp_path / "old.csv").write_text(
        "table,scale,arm,figure,unit,seed,best,rounds,simulated_seconds,seconds\n"
        "fedrolex-3,small,fedrolex/cifar10-high,global,%,1,,3,1,2\n"
    )
    (old,) = read_rows(tmp_path / "old.csv")
    assert (old.best, old.decides, old.stated) == (None, None, "")
    assert read_rows(tmp_path / "none.csv") == ()
    (tmp_path / "t.csv").write_text(
        as_csv(rows)[:-40]
    )  # what is left of the last figure is no figure
    with pytest.raises(DataError, match=r"t\.csv"):
        read_rows(tmp_path / "t.csv")
    (tmp_path / "t.csv").write_text("table\nx\n")
    with pytest.raises(DataError, match=r"t\.csv"):
        read_rows(tmp_path / "t.csv")


def test_json_has_the_same_figures(rolex):
    values = to_json(*found_in("fedrolex-3", rolex))
    assert values["figures"][1]["mean"] == pytest.approx(27.0)
    assert [claim["verdict"] for claim in values["claims"] if claim["by_seed"]] == [REPEATED]


def test_files_are_written(rolex, tmp_path):
    """Markdown, figures, curves and a plot; one more plot where a table is about time."""
    written = write_table(find_experiment("fedrolex-3"), "small", rolex, tmp_path / "new")
    names = [path.name for path in written.paths]
    assert names == [
        "fedrolex-3.md",
        "fedrolex-3.csv",
        "fedrolex-3.curves.csv",
        "fedrolex-3-accuracy.png",
    ]
    assert all(path.stat().st_size for path in written.paths)
    run = result(
        "whalefl-1", "fedavg/non-iid-2", 1, [row(1, 0.5, total=36.0), row(2, 0.6, total=72.0)]
    )
    written = write_table(find_experiment("whalefl-1"), "small", [run], tmp_path)
    assert [path.name for path in written.paths[3:]] == [
        "whalefl-1-accuracy.png",
        "whalefl-1-time.png",
    ]


def test_curves_are_stored_and_plots_made_of_them_alone(rolex, tmp_path):
    """Evaluated rounds with all bytes since the one before; those of arms that are not there any
    more stay.
    """
    experiment = find_experiment("fedrolex-3")
    folder = tmp_path / "fedrolex-3"
    late = replace(
        rolex[3],
        rows=(row(1), row(2, 0.4, total=8.0), row(3), row(4), row(5, 0.123456789, total=9.5)),
    )
    write_table(experiment, "small", rolex[:3], folder)
    write_table(experiment, "small", [late], folder)
    points = read_points(folder / "fedrolex-3.curves.csv")
    assert [(point.arm.partition("/")[0], point.seed) for point in points[-3:]] == [
        ("federated-dropout", 3),
        ("fedrolex", 1),
        ("fedrolex", 1),
    ]
    assert [point.round for point in points if point.arm == "fedrolex/cifar10-high"] == [2, 5]
    assert points[-1].payload_bytes == 30
    assert (points[-1].accuracy, points[-1].simulated_total, points[-1].widths) == (
        0.123457,
        9.5,
        "",
    )
    assert len(points) == 3 * 3 + 2
    plot = folder / "fedrolex-3-accuracy.png"
    before = plot.read_bytes()
    plot.unlink()
    draw(experiment, "small", points, folder)
    assert plot.read_bytes() == before
    draw(experiment, "small", points[:3], folder)
    assert plot.read_bytes() != before


def test_a_table_of_no_paper_speaks_of_none(tmp_path):
    """And is plotted over the bytes and the time that its figures are for."""
    rows = [
        replace(
            row(number, 0.5, total=400.0 * number), payload_bytes=2_000_000, simulated_seconds=400.0
        )
        for number in range(1, 4)
    ]
    written = write_table(
        find_experiment("beyond-1"), "small", [result("beyond-1", "heterofl", 1, rows)], tmp_path
    )
    text = (tmp_path / "beyond-1.md").read_text()
    assert "Paper: <" not in text
    assert "published protocol" not in text
    assert [path.name.partition("1-")[2] for path in written.paths[3:]] == [
        "accuracy.png",
        "bytes.png",
        "time.png",
    ]


def test_a_page_says_which_runs_its_plots_lack(rolex):
    experiment, rows = found_in("fedrolex-3", rolex)
    every = {(stored_row.arm, stored_row.seed) for stored_row in rows}
    assert "runs, those with stored curves" not in as_markdown(experiment, rows, drawn=every)
    assert "runs, those with stored curves" not in as_markdown(experiment, rows)
    words = "The plots show 1 of the 5 runs, because only these have stored curves"
    assert words in as_markdown(experiment, rows, drawn=sorted(every)[:1])


def test_widths_that_devices_choose_are_stored_and_drawn(tmp_path):
    """All rounds of them, judged or not, of all seeds; the picture is of the first. Others choose
    none.
    """
    experiment = find_experiment("whalefl-strong")
    widths = {1: (1.0, None, *[0.0625] * 18), 2: (0.5,) * 20}
    rows = [row(1), row(2, 0.5, total=36.0)]
    runs = [
        replace(result(experiment.table, "whalefl/iid", seed, rows), widths=widths)
        for seed in (3, 4)
    ]
    write_table(
        experiment, "small", [*runs, result(experiment.table, "heterofl/iid", 3, rows)], tmp_path
    )
    first, second, *_, last_point = read_points(tmp_path / "whalefl-strong.curves.csv")
    assert first.widths.startswith("1 - 0.0625 ")
    assert (first.accuracy, first.by_device, second.by_device) == (None, widths[1], widths[2])
    assert (last_point.arm, last_point.widths) == ("heterofl/iid", "")
    plot = tmp_path / "whalefl-strong-widths.png"
    before = plot.read_bytes()
    changed = [replace(runs[0], widths={**widths, 2: (1.0,) * 20})]
    write_table(experiment, "small", changed, tmp_path)
    assert plot.read_bytes() != before
    assert f"![{plot.name}]({plot.name})" in (tmp_path / "whalefl-strong.md").read_text()


def test_a_table_that_states_something_else_keeps_what_was_written(rolex, tmp_path):
    """Of the same statement arms and seeds are joined; another one starts anew, with the earlier
    beside it.
    """
    experiment = find_experiment("fedrolex-3")
    write_table(experiment, "small", rolex[:3], tmp_path / "fedrolex-3")
    both = write_table(experiment, "small", rolex[3:], tmp_path / "fedrolex-3")
    assert len(both.rows) == 5
    changed = replace(experiment, decides={**experiment.decides, "small": 1})
    assert stated(changed, "small") != stated(experiment, "small") == stated(experiment, "small")
    written = write_table(changed, "small", rolex[3:], tmp_path / "fedrolex-3")
    assert len(written.rows) == 2
    kept = tmp_path / "fedrolex-3" / "earlier-1"
    assert read_rows(kept / "fedrolex-3.csv") == both.rows
    page = write_index(tmp_path, {"fedrolex-3": changed}).read_text()
    assert "- `fedrolex-3`: [earlier-1](fedrolex-3/earlier-1/fedrolex-3.md)\n" in page
    assert page.count("| not run | > 0 |") == 8
    assert "fedrolex-3.md): scale small, 1 of 24 arms, 2 runs." in page
    again = replace(changed, decides={**experiment.decides, "small": 2})
    page = write_index(tmp_path, {"fedrolex-3": again}).read_text()
    assert "`fedrolex-3`: not run." in page
    assert read_rows(kept.with_name("earlier-2") / "fedrolex-3.csv") == written.rows
    write_table(experiment, "small", rolex[:1], tmp_path / "fedrolex-3")
    write_index(tmp_path, {"fedrolex-3": again})
    assert read_rows(kept / "fedrolex-3.csv") == both.rows
    assert len(read_rows(kept.with_name("earlier-3") / "fedrolex-3.csv")) == 1


def test_a_report_of_another_scale_leaves_what_was_written(rolex, tmp_path):
    """A smoke run into the folder of the published results had set them aside."""
    experiment = find_experiment("fedrolex-3")
    folder = tmp_path / "fedrolex-3"
    written = write_table(experiment, "small", rolex, folder)
    before = {path: path.read_bytes() for path in folder.rglob("*")}
    smoke = result("fedrolex-3", "fedrolex/cifar10-high", 1, [row(10, 0.1)], "smoke")
    with pytest.raises(
        ConfigError, match="has this table at scale small; name another folder for smoke"
    ):
        write_table(experiment, "smoke", [smoke], folder)
    assert {path: path.read_bytes() for path in folder.rglob("*")} == before
    assert read_rows(folder / "fedrolex-3.csv") == written.rows


def test_runs_that_are_older_than_any_statement_stay_and_are_named(rolex, tmp_path):
    """They are judged by the last evaluation, all that they have."""
    experiment = find_experiment("fedrolex-3")
    folder = tmp_path / "fedrolex-3"
    old = [
        stored_row.model_copy(update={"stated": "", "decides": None})
        for stored_row in found_in("fedrolex-3", rolex[:3])[1]
    ]
    write_rows(experiment, old, folder)
    written = write_table(experiment, "small", rolex[3:], folder)
    assert [stored_row.stated for stored_row in written.rows] == [
        *[""] * 3,
        *[stated(experiment, "small")] * 2,
    ]
    assert read_rows(folder / "earlier-1" / "fedrolex-3.csv") == tuple(
        old
    )  # with the plots of then
    write_table(experiment, "small", rolex[3:], folder)
    assert [path.name for path in folder.glob("earlier-*")] == ["earlier-1"]
    (older,) = {stored_row.arm for stored_row in old}
    text = (folder / "fedrolex-3.md").read_text()
    assert f"Runs of {older} are older than the statement of the claims." in text
    assert f"For {older}, and for claims about these arms, it is the last evaluation," in text


def test_only_what_is_claimed_of_an_older_run_goes_by_the_last_evaluation():
    """One old run had all claims of its table judged by another figure than was stated."""
    runs = [
        result("fedrolex-3", f"{arm}/cifar10-high", seed, [row(10, first), row(20, last)])
        for arm, first, last in (
            ("fedrolex", 0.2, 0.4),
            ("heterofl", 0.1, 0.1),
            ("federated-dropout", 0.2, 0.3),
        )
        for seed in (1, 2, 3)
    ]
    experiment, rows = found_in("fedrolex-3", runs)

    def by_seed(*old):
        """Of FedRolex above these two, where some runs have no mean of the last evaluations."""
        rows_of_seeds = [
            r.model_copy(update={"decides": None})
            if (r.arm.partition("/")[0], r.seed) in old
            else r
            for r in rows
        ]
        shown = {
            figure.arm.name: figure.by_seed("deciding")[1]
            for figure in figures(experiment, rows_of_seeds)
        }
        judged_by_arm = {
            judged.claim.right: judged
            for judged in judge(experiment, rows_of_seeds)
            if judged.by_seed
        }
        right = [f"{arm}/cifar10-high" for arm in ("heterofl", "federated-dropout")]
        return [judged_by_arm[arm].by_seed for arm in right], shown[
            "federated-dropout/cifar10-high"
        ]

    def everywhere(difference):
        return pytest.approx(dict.fromkeys((1, 2, 3), difference))

    assert by_seed() == ([everywhere(20.0), everywhere(5.0)], pytest.approx(25.0))
    # 40 - 30, the last of both arms, although FedRolex has its means, and so do the other two
    # seeds.
    assert by_seed(("federated-dropout", 2)) == (
        [everywhere(20.0), everywhere(10.0)],
        pytest.approx(30.0),
    )
    assert by_seed(("heterofl", 2)) == ([everywhere(30.0), everywhere(5.0)], pytest.approx(25.0))


@pytest.mark.parametrize("drawn", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_page_of_results_is_what_the_command_makes(tmp_path, monkeypatch, drawn):
    """Every table, and the page, from the stored figures alone: nothing there is edited by hand.

    To draw the pictures takes five times as long as all that is written.
    """
    folder = Path(__file__).parents[2] / "docs" / "results"
    shutil.copytree(folder, tmp_path / "results")
    if not drawn:
        monkeypatch.setattr(writing, "draw", lambda *_: None)
    write_index(tmp_path / "results", TABLES)
    for path in folder.rglob("*.*"):
        written = tmp_path / "results" / path.relative_to(folder)
        if path.suffix == ".png":  # other processors may round a pixel otherwise
            assert np.abs(imread(path) - imread(written)).mean() < 1e-3, path
        else:
            assert path.read_bytes() == written.read_bytes(), path


def test_each_quantity_has_a_plot_of_its_own(tmp_path):
    """A table is plotted by what it prints: CoLA by its correlation, SST-2 by accuracy; nothing
    else is.
    """
    cola = result("inclusivefl-2", "inclusivefl/cola", 1, [replace(row(1, 0.69), matthews=0.1)])
    sst2 = result("inclusivefl-2", "inclusivefl/sst2", 1, [row(1, 0.8)])
    experiment = find_experiment("inclusivefl-2")
    both = write_table(experiment, "small", [cola, sst2], tmp_path / "both").paths[3:]
    assert [path.name for path in both] == [
        "inclusivefl-2-accuracy.png",
        "inclusivefl-2-matthews.png",
    ]
    alone = write_table(experiment, "small", [sst2], tmp_path / "one").paths[3:]
    assert [path.read_bytes() for path in alone] == [both[0].read_bytes()]
    assert "![inclusivefl-2-matthews.png]" in (tmp_path / "both" / "inclusivefl-2.md").read_text()


def test_the_page_begins_with_how_many_claims_hold(tmp_path):
    """In words and as a picture, whose bars are as wide as their claims are many."""
    counts = [
        {
            "claims of": "A",
            "holds": "3",
            "does not hold": "0",
            "undecided": "1",
            REACH: "0",
            REPEATED: "1",
            "not run": "2",
        },
        {
            "claims of": "B",
            "holds": "1",
            "does not hold": "2",
            "undecided": "0",
            REACH: "3",
            REPEATED: "0",
            "not run": "0",
        },
    ]
    assert totals(counts) == {
        "holds": 4,
        "does not hold": 2,
        "undecided": 1,
        REACH: 3,
        REPEATED: 1,
        "not run": 2,
    }
    assert in_words(counts).startswith(
        "**4 of 13 claims hold**, 2 do not hold, 1 are undecided, 3 are out of reach here, "
        "1 are repeated in another table, and 2 have not been tested."
    )
    widths = re.findall(r'width="([\d.]+)" height="22"', chart(counts))
    assert [float(width) / 9 for width in widths[6:]] == [3, 1, 1, 2, 1, 2, 3]
    page = write_index(tmp_path, {"fedrolex-3": find_experiment("fedrolex-3")}).read_text()
    assert page.index("![Claims by paper and verdict](verdicts.svg)") < page.index("## Verdicts")
    assert (tmp_path / "verdicts.svg").read_text().startswith("<svg")


def test_the_picture_of_few_claims_is_as_wide_as_its_legend():
    """The last verdict of the legend lies within the picture."""
    picture = chart([{"claims of": "A", **dict.fromkeys(VERDICTS, "0"), "holds": "1"}])
    width = int(re.search(r'viewBox="0 0 (\d+) ', picture)[1])
    left = int(re.search(r'<text x="(\d+)" [^>]*>not run</text>', picture)[1])
    letters = len("not run")
    assert left + 8 * letters < width


def test_sizes_are_a_table_and_columns_where_runs_stored_them(tmp_path):
    """Means over the seeds; files and pages of earlier runs are as they were."""
    experiment = find_experiment("heterofl-1")
    earlier = [result("heterofl-1", "e/iid", 1, [row(1, 0.5)])]
    rows = rows_of(experiment, "small", earlier)
    assert as_csv(rows).splitlines()[0].endswith(",stated,begun")
    assert "Sizes are means" not in as_markdown(experiment, rows)
    sized = [
        replace(result("heterofl-1", "a-e/iid", seed, [row(1, 0.5)]), sizes=sizes)
        for seed, sizes in (
            (1, Sizes(parameters=1000.0, flops=2e6)),
            (2, Sizes(parameters=3000.0, flops=4e6)),
        )
    ]
    rows = rows_of(experiment, "small", [*earlier, *sized])
    page = as_markdown(experiment, rows)
    assert "| a-e/iid | 2,000 | 3,000,000 | 0.01 |" in page
    assert "| e/iid | 2" not in page
    path = tmp_path / "rows.csv"
    path.write_text(as_csv(rows))
    assert read_rows(path) == rows
