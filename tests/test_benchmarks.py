"""Benchmarks remember what they found, and tell what got worse on the same kind of machine."""

import pytest

from benchmarks import device_memory, history, run, step_time, threads
from benchmarks.row import Row
from fleet_protocol.errors import ConfigError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "history.csv"


def entry(path, row):
    """What the history has of a row that is kept in it."""
    history.keep([row], path)
    return history.before(path)[row.name][-1]


def test_a_history_gives_back_what_was_kept(path):
    """Oldest first, with what a comparison needs."""
    history.keep(
        [
            Row("a, b", 1.5, "ms", 2.0, low=1.0, high=2.0),
            Row("c", None, "skipped: nothing is there"),
        ],
        path,
    )
    history.keep([Row("a, b", 2.5, "ms", 2.0)], path)
    found = history.before(path)
    assert [one["value"] for one in found["a, b"]] == ["1.5", "2.5"]
    assert found["a, b"][0]["budget"] == "2.0"
    assert float(found["a, b"][0]["load"]) >= 0
    assert "c" not in found
    assert path.read_text().count("date,commit,") == 1


def test_a_model_that_cannot_be_measured_is_a_row_of_the_table(monkeypatch):
    """And not the end of it: the models behind it are measured."""

    def fail(case, folder):
        raise ConfigError(f"{case.arch} needs weights that are not installed")

    monkeypatch.setattr(step_time, "Subjects", fail)
    (row,) = step_time.measured(step_time.Case("minilm_encoder"))
    assert row.value is None
    assert row.unit == "skipped: minilm_encoder needs weights that are not installed"
    assert row.name == "step, minilm_encoder width 1 batch 32"


def test_a_net_whose_memory_cannot_be_measured_is_a_row(monkeypatch):
    """Here its set cannot be written."""

    def fail(case):
        raise ConfigError(f"{case.arch} needs weights that are not installed")

    monkeypatch.setattr(device_memory.UncheckedSet, "of", fail)
    (row,) = device_memory.measured(step_time.Case("minilm_encoder"))
    assert row.unit == "skipped: minilm_encoder needs weights that are not installed"
    assert row.name == "memory of a device, minilm_encoder width 1 batch 32"


def test_threads_are_compared_where_a_step_takes_long_enough(monkeypatch, tmp_path):
    """A net that cannot be exported is a row, too; a short step is not worth a second thread."""
    case = step_time.Case("mlp", 0.25, 4)
    monkeypatch.setattr(threads, "CASES", (case,))
    monkeypatch.setattr(threads, "thread_counts", lambda: (2,))
    monkeypatch.setattr(threads, "TURNS", 3)
    monkeypatch.setattr(threads, "TURN_SECONDS", 0.001)
    (row,) = threads.measured(case, tmp_path)
    assert row.unit == "skipped: it cannot be exported here"
    threads.write_sets(tmp_path)
    (row,) = threads.measured(case, tmp_path)
    assert row.name == "step with one thread, mlp width 0.25 batch 4"
    monkeypatch.setattr(threads, "LEAST_SECONDS", 0.0)
    two, auto = threads.measured(case, tmp_path)
    assert two.name == "threads, speed of two/one, mlp width 0.25 batch 4"
    assert two.at_least
    assert auto.note.startswith("CPU")
    monkeypatch.setattr(threads, "thread_counts", lambda: ())
    (row,) = threads.measured(case, tmp_path)
    assert row.unit == "skipped: one processor is available"


def test_other_machines_are_not_compared_with(path, monkeypatch):
    history.keep([Row("a", 1.0, "ms")], path)
    monkeypatch.setattr(history, "machine_name", lambda: "another")
    assert history.before(path) == {}


@pytest.mark.parametrize(
    ("before", "now", "is_worse"),
    [
        (Row("r", 1.0, "x"), Row("r", 1.09, "x"), False),
        (Row("r", 1.0, "x"), Row("r", 1.11, "x"), True),
        (Row("r", 1.0, "x"), Row("r", 0.5, "x"), False),
        (Row("r", 1.0, "x", 1.0, at_least=True), Row("r", 0.85, "x", 1.0, at_least=True), True),
        (Row("r", 1.0, "x", 1.0, at_least=True), Row("r", 1.85, "x", 1.0, at_least=True), False),
        (Row("r", 1.0, "x", low=0.9, high=1.3), Row("r", 1.25, "x", low=1.2, high=1.4), False),
        (Row("r", 1.0, "x", low=0.9, high=1.1), Row("r", 1.25, "x", low=1.2, high=1.4), True),
        (
            Row("r", 1.0, "x", low=0.9, high=1.1),
            Row("r", 0.9, "x", 0.5, at_least=True, low=0.8, high=0.95),
            False,
        ),
        (
            Row("r", 1.0, "x", low=0.9, high=1.1),
            Row("r", 0.8, "x", 0.5, at_least=True, low=0.7, high=0.89),
            True,
        ),
        (Row("r", 1.0, "x"), Row("r", None, "skipped"), False),
    ],
)
def test_worse_is_what_spread_does_not_explain(path, before, now, is_worse):
    """With quartiles they lie apart; a figure that was taken once is a tenth off."""
    assert history.worse(now, entry(path, before)) == is_worse


def test_what_lacks_skips_a_benchmark_and_is_named(monkeypatch):
    """A row that has no budget to miss."""

    def rows():
        raise ConfigError("mosquitto is not installed")

    monkeypatch.setattr("benchmarks.reslicing.rows", rows)
    (row,) = run.measured("reslicing")
    assert row.unit == "skipped: mosquitto is not installed"
    assert row.ok


def test_a_run_prints_the_history_and_what_got_worse(path, monkeypatch, capsys):
    monkeypatch.setattr(history, "HISTORY", path)
    monkeypatch.setattr(history.before, "__defaults__", (path,))
    monkeypatch.setattr(history.keep, "__defaults__", (path,))
    figures = iter((1.0, 1.5))
    monkeypatch.setattr("benchmarks.merge.rows", lambda: [Row("folding", next(figures), "s", 1.2)])
    assert run.main(["merge"]) == 0
    assert "worse" not in capsys.readouterr().out
    assert run.main(["merge"]) == 1
    said = capsys.readouterr().out
    assert "worse folding: 1 on " in said
    assert "now 1.5" in said
    assert run.main(["merg"]) == 2
