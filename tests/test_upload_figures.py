"""The table of encodings in `docs/rounds.md` is that of the stored runs, and keeps what the settings promise."""

import json
from itertools import groupby
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
UPLOADS = json.loads((DOCS / "upload-encodings.json").read_text())
RUNS = UPLOADS["runs"]
DOWNLOADS = json.loads((DOCS / "download-encodings.json").read_text())["runs"]
SEEDS = (1, 2, 3)


def of_kind(run):
    return run["task"], " ".join(str(run[key]) for key in ("encoding", "keep") if key in run)


def total(task, encoding, key):
    return sum(run[key] for run in RUNS if of_kind(run) == (task, encoding))


def test_the_table_is_that_of_the_stored_runs():
    """Bytes, shares and accuracies of every task and encoding, and no other rows."""
    section = (DOCS / "rounds.md").read_text().partition("## How updates travel")[2].partition("\n## ")[0]
    cells = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in section.splitlines() if line[:1] == "|"]
    expected = []
    for (task, encoding), runs in groupby(sorted(RUNS, key=of_kind), of_kind):
        accuracies = {run["seed"]: f"{run['accuracy']:.4f}" for run in runs}
        shares = [total(task, encoding, key) / total(task, "fp32", key) for key in ("upload_bytes", "payload_bytes")]
        size = total(task, encoding, "upload_bytes") / total(task, encoding, "updates") / 1000
        told = ", ".join(accuracies[seed] for seed in SEEDS)
        expected.append([task, encoding, f"{size:.1f}", *(f"{share:.3f}" for share in shares), told])
    assert len({task for task, *_ in expected}) == 3
    assert sorted(cells[2:]) == expected


@pytest.mark.parametrize("task", ["digits", "mnist"])
@pytest.mark.parametrize(("encoding", "share", "points"), [("int8", 0.27, 0.003), ("int4", 0.14, 0.006)])
def test_the_promised_bytes_and_accuracies_are_kept(task, encoding, share, points):
    """At most 0.27 and 0.14 of the bytes of fp32, and a mean accuracy at most 0.3 and 0.6 points lower."""
    uploads, means = ([total(task, name, key) for name in (encoding, "fp32")] for key in ("upload_bytes", "accuracy"))
    assert uploads[0] <= share * uploads[1]
    assert means[0] / len(SEEDS) >= means[1] / len(SEEDS) - points


def test_the_table_of_downloads_is_that_of_the_stored_runs():
    """Bytes, shares, accuracies, and what rounding took of the weights."""
    section = (DOCS / "rounds.md").read_text().partition("## How weights travel")[2].partition("\n## ")[0]
    cells = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in section.splitlines() if line[:1] == "|"]
    expected = []
    for ways in {(run["download"], run["upload"]) for run in DOWNLOADS}:
        runs, plain = (
            [run for run in DOWNLOADS if (run["download"], run["upload"]) == found]
            for found in (ways, ("fp32", "fp32"))
        )
        size, whole = (sum(run["task_download_bytes"] for run in found) for found in (runs, plain))
        paid, all_paid = (sum(run["payload_bytes"] for run in found) for found in (runs, plain))
        told = ", ".join(f"{run['accuracy']:.4f}" for run in sorted(runs, key=lambda run: run["seed"]))
        taken = ", ".join(f"{value:.3f}" for value in runs[0].get("lost_percent_of_norm", ()))
        kilobytes = size / sum(run["updates"] for run in runs) / 1000
        expected.append([*ways, f"{kilobytes:.1f}", f"{size / whole:.3f}", f"{paid / all_paid:.3f}", told, taken])
    assert sorted(cells[2:]) == sorted(expected)
