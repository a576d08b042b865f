"""Tables in the documents are those of the stored runs, and the runs keep what the documents
promise.
"""

import json
import re
from statistics import fmean

import pytest

from broker_server.settings.fleet import PrivacyConfig
from broker_server.settings.robust import RobustConfig
from broker_server.store.privacy_spent import epsilon_after
from tests.documents.stored_tables import (
    DATA,
    DOCS,
    TABLES,
    encoding_of,
    newest_demos,
    reached,
    runs_of,
    total,
)
from tests.simulation import attack_figures, privacy_figures

OTHER_FILES = {
    "asyncapi": "generated from the messages",
    "openapi": "generated from the API",
    "platforms": "`test_platforms.py`, as `make docs` writes its table",
}
"""Files beside the documents that no table here is made of, and why."""

OTHER_RUNS = {"packages.json": "`tests/packages/test_gallery.py` holds its table"}
"""Stored runs whose tables other tests hold, and which."""


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_table_is_that_of_its_stored_runs(table):
    """Every stored run is in the table as it ended, and nothing else is."""
    written = table.written()
    assert len(written) > 2
    assert sorted(written) == sorted(table.computed())


def test_every_stored_file_has_its_table():
    """Or it is said where its figures are held against the documents."""
    stored = {path.name for path in DATA.iterdir()}
    assert stored == {table.stored for table in TABLES.values()} | OTHER_RUNS.keys()
    assert {path.stem for path in DOCS.glob("*.json")} == OTHER_FILES.keys()


@pytest.mark.parametrize("figures", [attack_figures, privacy_figures], ids=["robust", "privacy"])
def test_what_was_simulated_is_what_would_be_simulated_today(figures):
    """The settings of the stored runs are those of the script that made them."""
    stored = json.loads(figures.FILE.read_text())
    assert stored["tables"] == json.loads(json.dumps(figures.TABLES))


def test_every_noise_and_every_lie_was_simulated():
    """For each seed, and each setting with its lies."""
    noises = {(run["noise_multiplier"], run["seed"]) for run in runs_of("privacy.json")}
    assert noises == {
        (noise, seed) for noise in privacy_figures.NOISES for seed in privacy_figures.SEEDS
    }
    assert {run["robust"] for run in runs_of("robust-merging.json")} == attack_figures.ROBUST.keys()


def test_the_readme_is_of_five_seeds():
    """All of one date, on one machine."""
    newest = newest_demos(runs_of("demo.json"))
    assert sorted(run["seed"] for run in newest) == [1, 2, 3, 4, 5]


def test_the_demo_on_mnist_ends_as_its_page_says():
    """After the rounds that its sentence names."""
    page = " ".join((DOCS / "benchmarks" / "demo.md").read_text().split())
    said = re.search(r"accuracy of (\S+) after round (\d+) and (\S+) after round (\d+)", page)
    assert said is not None
    first, first_round, last, last_round = said.groups()
    (run,) = (run for run in runs_of("demo.json") if run["data"] == "mnist")
    assert {first_round: float(first), last_round: float(last)} == run["by_round"]


@pytest.mark.parametrize("accuracy", [0.95, 0.97])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_rounds_that_do_not_wait_take_at_most_seven_tenths_of_the_time(accuracy, seed):
    """Until an accuracy, of rounds that wait for the slow board."""
    of_seed = {run["buffer"]: run for run in runs_of("asynchronous.json") if run["seed"] == seed}
    assert reached(of_seed[4], accuracy) <= 0.7 * reached(of_seed[None], accuracy)


@pytest.mark.parametrize("task", ["digits", "mnist"])
@pytest.mark.parametrize(
    ("encoding", "share", "points"), [("int8", 0.27, 0.003), ("int4", 0.14, 0.006)]
)
def test_encodings_keep_the_promised_bytes_and_accuracies(task, encoding, share, points):
    """At most 0.27 and 0.14 of the bytes of fp32, and a mean accuracy at most 0.3 and 0.6 points
    lower.
    """
    runs = runs_of("upload-encodings.json")
    assert len({run["task"] for run in runs}) == 3
    encoded = [run for run in runs if encoding_of(run) == (task, encoding)]
    plain = [run for run in runs if encoding_of(run) == (task, "fp32")]
    assert total(encoded, "upload_bytes") <= share * total(plain, "upload_bytes")
    assert (
        fmean(run["accuracy"] for run in encoded)
        >= fmean(run["accuracy"] for run in plain) - points
    )


@pytest.mark.parametrize("noise", [noise for noise in privacy_figures.NOISES if noise is not None])
def test_epsilon_is_that_of_every_device_in_every_round(noise):
    """All devices were asked in all rounds."""
    stored = json.loads(privacy_figures.FILE.read_text())
    config = PrivacyConfig(clip=stored["clip"], noise_multiplier=noise)
    expected = round(epsilon_after(config, privacy_figures.TABLES["round"]["rounds"]), 2)
    assert {run["epsilon"] for run in stored["runs"] if run["noise_multiplier"] == noise} == {
        expected
    }


def test_what_hides_a_device_among_five_hundred_costs_little():
    """The mean over the seeds is within a point up to the noise of an epsilon of 18, and falls with
    more.
    """
    runs = runs_of("privacy.json")
    means = {
        noise: fmean(run["accuracy"] for run in runs if run["noise_multiplier"] == noise)
        for noise in privacy_figures.NOISES
    }
    assert abs(means[None] - means[1.0]) < 0.01
    assert means[1.0] > means[3.0] > means[10.0]


@pytest.mark.parametrize("lie", [(1, -10), (3, 10), (3, -10)])
def test_the_mean_fails_and_the_default_and_krum_do_not(lie):
    """Within a point of the run without liars, whoever scales what was learnt by ten, in either
    direction.
    """
    assert RobustConfig().norm_factor == 5
    assert RobustConfig().bounded_devices <= 10
    runs = {
        (run["robust"], run["liars"], run["factor"]): run["accuracy"]
        for run in runs_of("robust-merging.json")
    }
    clean = runs["norm_bound = 0", 0, 1]
    assert runs[("norm_bound = 0", *lie)] < clean / 2
    assert runs[("the defaults", *lie)] >= clean - 0.01
    if lie[0] == 3:
        assert runs[('merge = "krum", faulty = 0.3', *lie)] >= clean - 0.01
