"""Running tables: complete runs stay, those cut short go on, and wrong names end with exit code
2.
"""

import json
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fleet_protocol.configuration import read_toml
from fleet_protocol.errors import ConfigError, DataError
from fleet_protocol.locks import held
from reproduction import running
from reproduction.report.cells import duration_text
from reproduction.report.writing import write_table
from reproduction.run_costs import estimated_seconds
from reproduction.running import (
    RunFailedError,
    TablePart,
    collect,
    jobs,
    run_job,
    table_folder,
)
from reproduction.stored import rows_of
from reproduction.table_file import TABLES, find_experiment
from shoal.cli.commands import reproduce as commands
from shoal.cli.main import app
from simulation.data.datasets import DATASETS
from simulation.results.history import write_history
from tests.reproduction.test_rendering import row
from tests.simulation.data_folder import FOLDER, needs_minilm

SHOAL = Path(sys.executable).with_name("shoal")


def complete(job, rows, **changes):
    """What a complete run leaves behind."""
    record = {
        "table": job.experiment.table,
        "scale": job.scale,
        "arm": job.arm.name,
        "config": {**job.config.model_dump(mode="json"), **changes},
        "versions": {"python": "3"},
        "machine": "test",
    }
    write_history(job.config.out, rows)
    (job.config.out / "result.json").write_text(json.dumps(record))


def test_there_is_a_job_for_each_arm_and_seed(tmp_path):
    """All arms with the first seed come first; every job has a folder of its own and shares the
    cache.
    """
    found = jobs(find_experiment("fedrolex-3"), "small", tmp_path)
    assert [(job.config.seed, job.arm.name.partition("/")[0]) for job in found[:4]] == [
        (1, "heterofl"),
        (1, "federated-dropout"),
        (1, "fedrolex"),
        (2, "heterofl"),
    ]
    assert len({job.config.out for job in found}) == len(found) == 9
    assert {job.config.cache for job in found} == {tmp_path / "fedrolex-3" / "small" / "cache"}
    only = jobs(
        find_experiment("fedrolex-3"), "small", tmp_path, TablePart((7,), ("largest/cifar10-low",))
    )
    assert [(job.arm.name, job.config.seed) for job in only] == [("largest/cifar10-low", 7)]
    with pytest.raises(ConfigError, match="twice"):
        jobs(find_experiment("fedrolex-3"), "small", tmp_path, TablePart((1, 1)))


def test_only_complete_runs_are_collected(tmp_path):
    """A folder without a result is no result; one of an arm's older configuration is left out of
    the table.
    """
    experiment = find_experiment("fedrolex-3")
    first, second, third, *_ = jobs(experiment, "small", tmp_path)
    assert not first.complete
    complete(first, [row(10, 0.2)])
    write_history(second.config.out, [row(10, 0.9)])  # stopped half-way
    complete(
        third,
        [row(10, 0.8)],
        train={**third.config.train.model_dump(mode="json"), "learning_rate": 9.0},
    )
    assert first.complete
    assert not second.complete
    assert [(run.arm.name, run.seed) for run in collect(experiment, "small", tmp_path)] == [
        (first.arm.name, 1)
    ]
    with pytest.raises(ConfigError, match="another configuration"):
        _ = third.complete


def test_a_seed_that_is_none_is_named(tmp_path):
    with pytest.raises(
        ConfigError, match=r"arm .* with seed -1: seed: .*greater than or equal to 0"
    ):
        jobs(find_experiment("fedrolex-3"), "small", tmp_path, TablePart(seeds=(-1,)))


def test_a_complete_run_is_not_run_again(tmp_path):
    """Its files stay as they are; nothing is even prepared."""
    (job, *_) = jobs(find_experiment("heterofl-1"), "smoke", tmp_path)
    complete(job, [row(1, 0.5)])
    before = (job.config.out / "result.json").stat().st_mtime_ns
    run_job(job, stage=pytest.fail, watch=pytest.fail)
    assert (job.config.out / "result.json").stat().st_mtime_ns == before
    assert not (job.config.out / "store").exists()


def test_a_run_with_fewer_rounds_is_to_go_on(tmp_path):
    """A table that now asks for more rounds leaves it out until it has had them; one that asks for
    fewer refuses it.
    """
    experiment = find_experiment("heterofl-1")
    (job, *_) = jobs(experiment, "smoke", tmp_path)
    rounds = job.config.round.rounds
    shorter, longer = (
        job.config.round.model_dump() | {"rounds": rounds + more} for more in (-1, 1)
    )
    complete(job, [row(1, 0.5)], round=shorter)
    assert not job.complete
    assert collect(experiment, "smoke", tmp_path) == ()
    complete(job, [row(1, 0.5)], round=longer)
    with pytest.raises(ConfigError, match="another configuration"):
        _ = job.complete
    complete(job, [row(1, 0.5)], keep_versions=7)
    assert job.complete


def test_a_damaged_result_is_an_error(tmp_path):
    (job, *_) = jobs(find_experiment("heterofl-1"), "smoke", tmp_path)
    complete(job, [row(1, 0.5)])
    (job.config.out / "result.json").write_text("{")
    with pytest.raises(DataError, match=r"result\.json"):
        _ = job.complete


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["heterofl1"], "did you mean 'heterofl-1'?"),
        (["heterofl-1", "--scale", "smal"], "did you mean 'small'?"),
        (["heterofl-1", "--only", "a/iid,b/idd"], "did you mean 'b/iid'?"),
        (["heterofl-1", "--seeds", "one"], "not a list of whole numbers"),
        (["heterofl-1", "--engine", "slurm"], "engine"),
        ([], "name a table or give --all; the tables are heterofl-1"),
    ],
)
def test_wrong_names_end_with_exit_code_2(tmp_path, typed, arguments, words):
    """The message says what there is; no folder is made."""
    found = typed("reproduce", *arguments)
    assert found.returncode == 2, found.stderr
    assert words in " ".join(found.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_tables_and_arms_are_listed(typed):
    """As JSON: every table with its arms."""
    tables = json.loads(typed("reproduce", "--list", "--json").stdout)
    assert [table["table"] for table in tables] == list(TABLES)
    arms = json.loads(typed("reproduce", "fml-1", "--list", "--json").stdout)
    assert [arm["arm"] for arm in arms] == [arm.name for arm in TABLES["fml-1"].arms]


def reproduce(*arguments):
    done = CliRunner().invoke(app, ["reproduce", *map(str, arguments)])
    assert done.exit_code == 0, done.exception
    return done


def test_a_budget_is_kept_and_the_headline_tables_come_first(tmp_path, monkeypatch):
    """A run whose arm took an hour is not started with a minute left; one that never ran is."""
    (first, second, *_) = jobs(find_experiment("heterofl-1"), "smoke", tmp_path)
    complete(first, [replace(row(1, 0.5), seconds=3600.0)])
    started = []
    monkeypatch.setattr(
        "shoal.cli.commands.reproduce._run",
        lambda job: started.append(job) or complete(job, [row(1, 0.5)]),
    )
    smoke = ["heterofl-1", "--scale", "smoke", "--out", tmp_path]
    reproduce(*smoke)  # writes the durations; the other arm has one, too, and is complete
    assert [job.arm for job in started] == [second.arm]
    seeds = [*smoke, "--seeds", "1,2"]
    assert (
        "skipped, because it takes 60.0 min: heterofl-1 smoke, 1 of 2: a-b-c-d-e/iid, seed 2"
        in " ".join(reproduce(*seeds, "--budget", "1m").stderr.split())
    )
    assert [(job.arm, job.config.seed) for job in started[1:]] == [(second.arm, 2)]
    assert [job.arm for job in started[2:]] == []
    reproduce(*seeds)
    assert [(job.arm, job.config.seed) for job in started[2:]] == [(first.arm, 2)]
    everything = reproduce(
        "--all", "--scale", "smoke", "--out", tmp_path, "--budget", "0s", "--json"
    )
    assert {row["table"] for row in json.loads(everything.stdout)} == {"heterofl-1"}
    left = re.findall(r"skipped, because no time is left: (\S+) smoke", everything.stderr)
    assert list(dict.fromkeys(left))[:3] == ["fedrolex-3", "inclusivefl-2", "whalefl-mild"]


@pytest.mark.slow
def test_what_lacks_its_data_is_left_out_and_the_rest_runs(tmp_path, monkeypatch):
    """Who has not all data sets gets the tables that need none; the end says so, and the same
    command goes on.
    """
    monkeypatch.delenv("SHOAL_DATA", raising=False)
    ran = []
    real = commands._run

    def run(job):
        if job.config.data.name != "digits":
            real(job)  # ends where it reads the data
            raise AssertionError
        ran.append(job)
        complete(job, [row(1, 0.5)])

    monkeypatch.setattr(commands, "_run", run)
    everything = ["reproduce", "--all", "--seeds", "1", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, everything)
    assert isinstance(done.exception, DataError)
    assert {job.experiment.table for job in ran} == {"beyond-1", "beyond-repeat"}
    said = " ".join(done.stderr.split())
    assert (
        "heterofl/cifar10-high, seed 1 reading cifar10 not complete: the data set cifar10 is not included: "
        "set SHOAL_DATA" in said
    )
    lacking = said.count("not complete: ")
    assert str(done.exception).startswith(f"{lacking} runs are not complete")
    assert lacking > 40
    monkeypatch.setattr(commands, "_run", ran.append)
    first = len(ran)
    assert CliRunner().invoke(app, everything).exit_code == 0
    assert len(ran) == first + lacking


def test_two_commands_share_the_runs_of_a_folder(tmp_path, monkeypatch):
    """What the other one is at is left to it."""
    (first, second, *_) = jobs(find_experiment("heterofl-1"), "smoke", tmp_path)
    real = commands._run
    ran = []

    def run(job):
        if job.config.out == first.config.out:
            real(job)
        ran.append(job.config.out)
        complete(job, [row(1, 0.5)])

    monkeypatch.setattr(commands, "_run", run)
    first.config.out.mkdir(parents=True)
    with held(first.config.out, "busy"):
        done = CliRunner().invoke(
            app, ["reproduce", "heterofl-1", "--scale", "smoke", "--out", str(tmp_path)]
        )
    assert "not complete: another simulation is running in" in done.stderr
    assert str(done.exception).startswith("1 runs are not complete")
    assert ran == [second.config.out]


def test_a_run_that_fails_does_not_end_the_table(tmp_path, monkeypatch):
    """With too high a learning rate, one arm of many may diverge."""
    (first, *others) = jobs(find_experiment("fml-rates"), "smoke", tmp_path, TablePart((1, 2)))
    ran = []

    def run(job):
        if job.config.out == first.config.out:
            raise RunFailedError("seed 1 failed: the loss is nan")
        ran.append(job.config.out)
        complete(job, [row(1, 0.5)])

    monkeypatch.setattr(commands, "_run", run)
    options = ["--scale", "smoke", "--seeds", "1,2", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, ["reproduce", "fml-rates", *options])
    assert "seed 1 failed: the loss is nan" in done.stderr
    assert str(done.exception).startswith("1 runs are not complete")
    assert ran == [job.config.out for job in others]


def test_a_report_of_nothing_is_an_error(tmp_path):
    """A mistyped folder or scale is not a page on which nothing was run."""
    (job, *_) = jobs(find_experiment("heterofl-1"), "smoke", tmp_path)
    complete(job, [row(1, 0.5)])
    done = CliRunner().invoke(
        app, ["reproduce", "--report", str(tmp_path / "page"), "--out", str(tmp_path)]
    )
    assert isinstance(done.exception, ConfigError)
    assert "no run at the scale small" in str(done.exception)
    assert not (tmp_path / "page").exists()


def test_the_list_has_durations_and_the_report_a_page(tmp_path):
    """From stored results, unknown else; a page of all claims, with the tables that are
    complete.
    """
    (job, *_) = jobs(find_experiment("heterofl-1"), "smoke", tmp_path)
    complete(job, [row(1, 0.5)])
    page = tmp_path / "docs" / "README.md"
    reproduce("--report", page.parent, "--scale", "smoke", "--out", tmp_path)
    assert (
        "| Five levels, IID, reach 98.5 % by round 10, as the released code does | undecided |"
        in page.read_text()
    )
    assert (page.parent / "heterofl-1" / "heterofl-1.md").is_file()
    listed = json.loads(
        reproduce("--list", "--json", "--scale", "smoke", "--out", page.parent).stdout
    )
    takes = {table["table"]: table["takes"] for table in listed}
    assert (takes["heterofl-1"], takes["heterofl-2"]) == ("measured 30.0 s, 1 unknown", "unknown")
    # What was set aside, when the table stated something else, says nothing of it.
    aside = page.parent / "heterofl-1" / "earlier-1"
    aside.mkdir()
    text = (page.parent / "heterofl-1" / "heterofl-1.csv").read_text()
    (aside / "heterofl-1.csv").write_text(text.replace(",30.0,", ",3000.0,"))
    assert (aside / "heterofl-1.csv").read_text() != text
    again = json.loads(
        reproduce("--list", "--json", "--scale", "smoke", "--out", page.parent).stdout
    )
    assert again == listed


def test_a_fresh_machine_sees_how_long_a_table_takes(tmp_path, monkeypatch):
    """From the stored processor time of a round and the cores; measured durations count, and say
    so.
    """
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    experiment = find_experiment("fml-1")
    takes = {
        table["table"]: table["takes"]
        for table in json.loads(reproduce("--list", "--json", "--out", tmp_path).stdout)
    }
    estimated = estimated_seconds(experiment, "small")
    assert takes["fml-1"] == f"~{duration_text(3 * sum(estimated.values()))}"
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert estimated_seconds(experiment, "small") == {
        arm: seconds / 2 for arm, seconds in estimated.items()
    }
    assert estimated_seconds(experiment, "smoke") == {}
    (job, *_) = jobs(experiment, "small", tmp_path)
    complete(job, [row(1, 0.5)])
    reproduce("--report", tmp_path, "--out", tmp_path, "fml-1")
    listed = json.loads(reproduce("fml-1", "--list", "--json", "--out", tmp_path).stdout)
    arms = {arm["arm"]: arm["time per run"] for arm in listed}
    assert arms[job.arm.name] == "measured 30.0 s"
    assert arms["fml/mnist-mlp/iid"] == f"~{duration_text(estimated['fml/mnist-mlp/iid'] / 2)}"
    assert arms["fml/cifar100-cnn2/iid"] == "unknown"
    left = reproduce(
        "fml-1", "--out", tmp_path, "--only", "fml/mnist-lenet5/iid", "--budget", "1s"
    ).stderr
    assert "skipped, because it takes" in left


def test_costs_are_of_arms_that_are_run_by_default():
    """Of no table or arm that there is not, and of all arms of the tables that came first."""
    costs = read_toml(Path(running.__file__).with_name("costs.toml"))
    chosen = {
        name: {arm.name for arm in experiment.chosen("small")}
        for name, experiment in TABLES.items()
    }
    assert [
        (table, arm) for table, arms in costs.items() for arm in arms if arm not in chosen[table]
    ] == []
    whole = {table for table, arms in costs.items() if set(arms) == chosen[table]}
    assert whole >= {
        "heterofl-1",
        "inclusivefl-2",
        "whalefl-mild",
        "whalefl-strong",
        "whalefl-static",
        "fml-1",
    }


SHIPPED = {"digits"}


def missing_data(experiment):
    """Data sets that the smoke runs of a table need and that are not here."""
    names = {arm.settings("smoke")["data"]["name"] for arm in experiment.chosen("smoke")}
    assert names <= set(DATASETS)
    return sorted(name for name in names - SHIPPED if not (FOLDER / name).is_dir())


def smoke_tables():
    for name, experiment in TABLES.items():
        absent = missing_data(experiment)
        marks = [pytest.mark.slow, pytest.mark.timeout(1200)]
        if absent:
            marks.append(
                pytest.mark.skip(reason=f"{', '.join(absent)} is not here; set SHOAL_DATA")
            )
        elif name.startswith("inclusivefl"):
            marks.append(needs_minilm)
        yield pytest.param(experiment, id=name, marks=marks)


# Their other arms are methods that other tables train, on the same models or smaller ones.
FIRST_ARM = {
    "heterofl-2",
    "fedrolex-3",
    "inclusivefl-2",
    "whalefl-mild",
    "whalefl-static",
    "whalefl-strong",
}


@pytest.mark.parametrize("experiment", list(smoke_tables()))
def test_every_table_runs_at_the_scale_smoke(experiment, cache, tmp_path, monkeypatch):
    """Training for real: each chosen arm is complete and in the table, with all figures that it
    should have.
    """
    monkeypatch.setenv("SHOAL_DATA", str(FOLDER))
    todo = jobs(experiment, "smoke", tmp_path)[: 1 if experiment.table in FIRST_ARM else None]
    for job in todo:
        run_job(replace(job, config=job.config.model_copy(update={"cache": cache})))
    results = collect(experiment, "smoke", tmp_path)
    assert [result.arm for result in results] == [job.arm for job in todo]
    for result in results:
        assert len(result.rows) == result.config.round.rounds
        for measure in result.arm.measures:
            assert measure.read(result.rows, 1) is not None, measure.name
    written = write_table(experiment, "smoke", results, table_folder(tmp_path, experiment, "smoke"))
    assert written.paths[2:]
    text = written.paths[0].read_text()
    for arm in experiment.arms:
        assert (f"\n| {arm.name} |" in text) == (arm in [job.arm for job in todo])


@pytest.mark.slow
def test_a_table_that_is_interrupted_goes_on_to_the_same_figures(tmp_path):
    """Ctrl-C after the first round: exit code 130 and no table; the same command finishes it, bit
    for bit.
    """
    command = [
        "fml-1",
        "--scale",
        "smoke",
        "--only",
        "fedavg/mnist-mlp/non-iid-3",
        "--workers",
        "1",
    ]

    def shoal(*arguments):
        line = [SHOAL, "reproduce", *map(str, arguments)]
        return subprocess.run(
            line, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
        )

    straight = shoal(*command, "--out", tmp_path / "straight")
    assert straight.returncode == 0, straight.stderr
    exports = Path("fml-1", "smoke", "cache")
    shutil.copytree(tmp_path / "straight" / exports, tmp_path / "cut" / exports)
    arguments = [SHOAL, "reproduce", *command, "--out", tmp_path / "cut"]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as cut:
        assert cut.stderr is not None
        for line in cut.stderr:
            if line.startswith("round 1:"):
                cut.send_signal(signal.SIGINT)
        cut.wait(timeout=60)
    assert cut.returncode == 130
    folder = tmp_path / "cut" / "fml-1" / "smoke"
    assert not list(folder.glob("*.md"))
    again = shoal(*command, "--out", tmp_path / "cut")
    assert again.returncode == 0, again.stderr
    assert "round 2:" in again.stderr
    assert "round 1:" not in again.stderr
    experiment = find_experiment("fml-1")
    figures = [
        [
            (row.arm, row.figure, row.reading)
            for row in rows_of(experiment, "smoke", collect(experiment, "smoke", out))
        ]
        for out in (tmp_path / "straight", tmp_path / "cut")
    ]
    assert figures[0] == figures[1]
