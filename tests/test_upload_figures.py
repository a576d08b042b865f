"""The table of encodings in `docs/rounds.md` is that of the stored runs, and keeps what the settings promise."""

import json
from itertools import groupby
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
RUNS = json.loads((DOCS / "upload-encodings.json").read_text())["runs"]
DOWNLOADS = json.loads((DOCS / "download-encodings.json").read_text())["runs"]


def of_kind(run):
    return run["strategy"], run["encoding"]


def total(strategy, encoding, key):
    return sum(run[key] for run in RUNS if of_kind(run) == (strategy, encoding))


def test_the_table_is_that_of_the_stored_runs():
    """Bytes, shares and accuracies of every strategy and encoding, and no other rows."""
    section = (DOCS / "rounds.md").read_text().partition("## How updates travel")[2].partition("\n## ")[0]
    cells = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in section.splitlines() if line[:1] == "|"]
    expected = []
    for (strategy, encoding), runs in groupby(sorted(RUNS, key=of_kind), of_kind):
        accuracies = {run["seed"]: f"{run['accuracy']:.4f}" for run in runs}
        shares = [
            total(strategy, encoding, key) / total(strategy, "fp32", key) for key in ("upload_bytes", "payload_bytes")
        ]
        size = total(strategy, encoding, "upload_bytes") / total(strategy, encoding, "updates") / 1000
        told = ", ".join(accuracies[seed] for seed in (1, 2, 3))
        expected.append([strategy, encoding, f"{size:.1f}", *(f"{share:.3f}" for share in shares), told])
    assert sorted(cells[2:]) == expected


def test_the_promised_bytes_and_accuracies_are_kept():
    """At most 0.27 and 0.14 of the bytes of fp32, and a mean accuracy at most 0.3 and 0.6 points lower."""
    for encoding, share, points in (("int8", 0.27, 0.003), ("int4", 0.14, 0.006)):
        uploads = [total("heterofl", name, "upload_bytes") for name in (encoding, "fp32")]
        means = [total("heterofl", name, "accuracy") / 3 for name in (encoding, "fp32")]
        assert uploads[0] <= share * uploads[1]
        assert means[0] >= means[1] - points


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
