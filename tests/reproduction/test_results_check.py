"""What ``make results-check`` chooses and says."""

import pytest

from reproduction.stored import as_csv, rows_of
from reproduction.table_file import find_experiment
from tests.reproduction import results_check
from tests.reproduction.results_check import chosen, compared
from tests.reproduction.test_rendering import result, row
from tests.reproduction.test_running import complete

ARM = "fedrolex/cifar10-high"


def stored(*accuracies, arm=ARM):
    runs = [
        result("fedrolex-3", arm, seed, [row(10, value)])
        for seed, value in enumerate(accuracies, 1)
    ]
    return rows_of(find_experiment("fedrolex-3"), "small", runs)


def written(folder, *rows):
    (folder / "fedrolex-3").mkdir()
    (folder / "fedrolex-3" / "fedrolex-3.csv").write_text(as_csv(rows))
    return folder


def test_an_arm_is_chosen_that_has_a_spread(tmp_path):
    """Three seeds at least; another that is named, or none, ends with what there is not."""
    rows = stored(0.2, 0.3, 0.4)
    folder = written(tmp_path, *stored(0.1, 0.2, arm="heterofl/cifar10-high"), *rows)
    assert chosen(folder) == chosen(folder, f"fedrolex-3 {ARM}") == rows
    with pytest.raises(SystemExit, match="heterofl"):
        chosen(folder, "fedrolex-3 heterofl/cifar10-high")


def test_a_new_seed_is_compared_with_the_stored_ones():
    """20, 30 and 40 say 30 +- 4.303 * 10 * sqrt(4/3); a figure that earlier versions did not store
    is passed over.
    """
    (found,) = compared(stored(0.2, 0.3, 0.4), stored(0.79))
    assert (found.low, found.high) == (
        pytest.approx(30 - 49.687, abs=1e-2),
        pytest.approx(30 + 49.687, abs=1e-2),
    )
    assert found.inside
    assert "as stored" in str(found)
    (found,) = compared(stored(0.2, 0.3, 0.4), stored(0.8))
    assert not found.inside
    assert "OUTSIDE" in str(found)
    older = [old.model_copy(update={"decides": None}) for old in stored(0.2, 0.3, 0.4)]
    assert [item.figure for item in compared(older, stored(0.3))] == ["global, last"]
    assert compared(stored(0.2, 0.3), stored(0.3)) == []


@pytest.mark.parametrize(("accuracy", "status"), [(0.3, 0), (0.9, 1)])
def test_the_check_ends_with_what_it_found(tmp_path, monkeypatch, capsys, accuracy, status):
    """A seed that is not stored is run, and its place among the others decides."""
    ran = []
    monkeypatch.setattr(
        results_check,
        "run_job",
        lambda job, **_: ran.append(job.config.seed) or complete(job, [row(10, accuracy)]),
    )
    folder = written(tmp_path, *stored(0.2, 0.3, 0.4))
    assert results_check.main(["--results", str(folder)]) == status
    assert not {1, 2, 3} & set(ran)
    assert (
        f"fedrolex-3, arm {ARM}, scale small, seed {ran[0]}; stored: 1, 2, 3"
        in capsys.readouterr().out
    )
