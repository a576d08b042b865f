"""Tables of the documents that are made of stored runs, and what each must say.

A row is a list of cells, without backticks. Where a cell is for people alone, it is left out on
both sides.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

__all__ = ["DATA", "DOCS", "ROOT", "TABLES", "StoredTable", "reached", "runs_of"]

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DATA = DOCS / "benchmarks" / "data"
SEEDS = (1, 2, 3)

Run = dict[str, Any]
Rows = list[list[str]]


def runs_of(stored: str, key: str = "runs") -> list[Run]:
    """The runs of a stored file, which has them under a key."""
    runs: list[Run] = json.loads((DATA / stored).read_text())[key]
    return runs


@dataclass(frozen=True)
class StoredTable:
    """A table of a document.

    Attributes:
        document: its path from the project's folder.
        head: first cells of its head, enough to tell it from the document's other tables.
        stored: file in docs/benchmarks/data that it is made of.
        expected: its rows, made of the stored runs.
        compared: what is compared of a written row.
        key: where the file has them.
    """

    document: str
    head: tuple[str, ...]
    stored: str
    expected: Callable[[list[Run]], Rows]
    compared: Callable[[list[str]], list[str]] = list
    key: str = "runs"

    def written(self) -> Rows:
        """The rows that stand in the document, without head and rule."""
        lines = (ROOT / self.document).read_text().splitlines()
        starts = [
            number
            for number, line in enumerate(lines)
            if cells(line)[: len(self.head)] == [*self.head]
        ]
        (start,) = starts
        rows = []
        for line in lines[start + 2 :]:
            if not line.startswith("|"):
                break
            rows.append(self.compared(cells(line)))
        return rows

    def computed(self) -> Rows:
        """The rows that the stored runs give."""
        return self.expected(runs_of(self.stored, self.key))


def cells(line: str) -> list[str]:
    """The cells of a line, if it is one of a table."""
    return [cell.replace("`", "").strip() for cell in line.split("|")[1:-1]]


def accuracies(runs: list[Run]) -> str:
    """Of each seed the accuracy, in the order of the seeds."""
    ordered = sorted(runs, key=lambda run: run["seed"])
    return ", ".join(f"{run['accuracy']:.4f}" for run in ordered)


def total(runs: list[Run], key: str) -> float:
    """A number of all runs together."""
    return sum(run[key] for run in runs)


def grouped(runs: list[Run], kind: Callable[[Run], Any]) -> dict[Any, list[Run]]:
    """The runs of each kind."""
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        groups.setdefault(kind(run), []).append(run)
    return groups


def reached(run: Run, accuracy: float) -> float:
    """Seconds of the emulated clock until an accuracy."""
    pairs = zip(run["seconds"], run["accuracy"], strict=True)
    return next(seconds for seconds, value in pairs if value >= accuracy)


def _asynchronous(runs: list[Run]) -> Rows:
    kinds = {(run["seed"], run["buffer"]): run for run in runs}
    rows = []
    for accuracy in (0.95, 0.97):
        for seed in SEEDS:
            waited = reached(kinds[seed, None], accuracy)
            went_on = reached(kinds[seed, 4], accuracy)
            rows.append(
                [
                    f"{accuracy:g}",
                    str(seed),
                    f"{waited:.0f}",
                    f"{went_on:.0f}",
                    f"{went_on / waited:.2f}",
                ]
            )
    return rows


ARMS = {"global": "Shoal", "all_small": "AllSmall", "exclusive": "Exclusive"}
"""The runs of a demo, by the names of its table."""


def _demo(runs: list[Run]) -> Rows:
    rows = []
    for run in runs:
        if run["data"] == "digits":
            figures = [f"{run['accuracy'][arm]:.4f}" for arm in ARMS]
            rows.append([run["date"], str(run["seed"]), *figures])
    return rows


def newest_demos(runs: list[Run]) -> list[Run]:
    """The demos on digits of the newest date, one for each seed."""
    digits = [run for run in runs if run["data"] == "digits"]
    newest = max(run["date"] for run in digits)
    return [run for run in digits if run["date"] == newest]


def _demo_in_short(runs: list[Run]) -> Rows:
    newest = newest_demos(runs)
    rows = []
    for arm, name in ARMS.items():
        values = [run["accuracy"][arm] for run in newest]
        figures = [f"{value:.4f}" for value in (fmean(values), min(values), max(values))]
        rows.append([name, *figures])
    return rows


def _without_description(row: list[str]) -> list[str]:
    return row[:4]


def _finetuning(runs: list[Run]) -> Rows:
    return [
        [
            str("fleet" in run),
            str(run["seed"]),
            ", ".join(f"{value:.4f}" for value in run["accuracy"]),
        ]
        for run in runs
    ]


def _where_it_ran(row: list[str]) -> list[str]:
    return [str("fleet" in row[0]), *row[1:]]


def _packing(contents: list[Run]) -> Rows:
    rows = []
    for content in contents:
        shares = [content.get(name) for name in ("huffman", "zlib_6", "zstd_1", "lzma")]
        figures = ["" if share is None else f"{share:.3f}" for share in shares]
        rows.append([content["what"], f"{content['bytes'] / 1e6:.2f}", *figures])
    return rows


def _without_remark(row: list[str]) -> list[str]:
    return [row[0].replace(",", ""), *row[1:-1]]


def _privacy(runs: list[Run]) -> Rows:
    rows = []
    for noise, alike in grouped(runs, lambda run: run["noise_multiplier"]).items():
        name = "without" if noise is None else f"{noise:g}"
        epsilon = "" if noise is None else f"{alike[0]['epsilon']:g}"
        rows.append([name, epsilon, accuracies(alike)])
    return rows


def _robust(runs: list[Run]) -> Rows:
    lies = ((0, 1), (1, -10), (3, 10), (3, -10), (3, -1))
    rows = []
    for name, alike in grouped(runs, lambda run: run["robust"]).items():
        measured = {(run["liars"], run["factor"]): f"{run['accuracy']:.4f}" for run in alike}
        rows.append([name, *(measured.get(lie, "") for lie in lies)])
    return rows


def encoding_of(run: Run) -> tuple[str, str]:
    """The task of a run, and how its updates were encoded."""
    return run["task"], " ".join(str(run[key]) for key in ("encoding", "keep") if key in run)


def _uploads(runs: list[Run]) -> Rows:
    kinds = grouped(runs, encoding_of)
    rows = []
    for (task, encoding), alike in kinds.items():
        plain = kinds[task, "fp32"]
        kilobytes = total(alike, "upload_bytes") / total(alike, "updates") / 1000
        shares = [
            total(alike, key) / total(plain, key) for key in ("upload_bytes", "payload_bytes")
        ]
        figures = [f"{kilobytes:.1f}", *(f"{share:.3f}" for share in shares)]
        rows.append([task, encoding, *figures, accuracies(alike)])
    return rows


def _downloads(runs: list[Run]) -> Rows:
    kinds = grouped(runs, lambda run: (run["download"], run["upload"]))
    plain = kinds["fp32", "fp32"]
    rows = []
    for ways, alike in kinds.items():
        kilobytes = total(alike, "task_download_bytes") / total(alike, "updates") / 1000
        shares = [
            total(alike, key) / total(plain, key)
            for key in ("task_download_bytes", "payload_bytes")
        ]
        lost = ", ".join(f"{value:.3f}" for value in alike[0].get("lost_percent_of_norm", ()))
        figures = [f"{kilobytes:.1f}", *(f"{share:.3f}" for share in shares)]
        rows.append([*ways, *figures, accuracies(alike), lost])
    return rows


TABLES = {
    "asynchronous": StoredTable(
        "docs/benchmarks/asynchronous.md", ("accuracy", "seed"), "asynchronous.json", _asynchronous
    ),
    "demo": StoredTable("docs/benchmarks/demo.md", ("date", "seed"), "demo.json", _demo),
    "demo in short": StoredTable(
        "README.md", ("Fleet", "mean"), "demo.json", _demo_in_short, _without_description
    ),
    "finetuning": StoredTable(
        "docs/finetuning.md", ("run", "seed"), "finetuning-sst2.json", _finetuning, _where_it_ran
    ),
    "packing": StoredTable(
        "docs/benchmarks/encodings.md",
        ("what", "its bytes, MB"),
        "packing.json",
        _packing,
        _without_remark,
        "share_left",
    ),
    "privacy": StoredTable(
        "docs/privacy.md", ("noise_multiplier", "epsilon"), "privacy.json", _privacy
    ),
    "robust": StoredTable(
        "docs/benchmarks/robustness.md", ("[robust]", "no attacker"), "robust-merging.json", _robust
    ),
    "uploads": StoredTable(
        "docs/benchmarks/encodings.md", ("task", "encoding"), "upload-encodings.json", _uploads
    ),
    "downloads": StoredTable(
        "docs/benchmarks/encodings.md",
        ("[download]", "[upload]"),
        "download-encodings.json",
        _downloads,
    ),
}
