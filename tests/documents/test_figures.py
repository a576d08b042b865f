"""Every accuracy in the documents comes from a stored file, or is computed here from one."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from reproduction.stored import read_rows
from reproduction.table_file import TABLES
from tests.documents.stored_tables import TABLES as TABLES_OF_DOCUMENTS
from tests.documents.stored_tables import runs_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CHECKS = DOCS / "results" / "checks"
WRITTEN = [
    ROOT / "README.md",
    *sorted(DOCS.glob("*.md")),
    *sorted((DOCS / "benchmarks").glob("*.md")),
    *sorted((DOCS / "methods").glob("[!s]*.md")),
]
"""Documents for people; the specification tells what the papers print."""

SHARE = re.compile(r"(?<![\w.,-])0\.\d{3,4}(?![\d.])")

SST2 = runs_of("finetuning-sst2.json")


def lasts(arch: str, strategy: str) -> list[float]:
    chosen = [
        run
        for run in SST2
        if (run["arch"], run["strategy"]) == (arch, strategy) and not run.get("fleet")
    ]
    return [run["accuracy"][-1] for run in chosen]


COMPUTED = {
    "README.md": [
        float(figure)
        for row in TABLES_OF_DOCUMENTS["demo in short"].computed()
        for figure in row[1:]
    ],
    "finetuning.md": [
        fmean(lasts("minilm_encoder", "fedavg")),
        fmean(lasts("minilm_adapters", "hetlora")),
    ],
}
"""What a document says of several stored runs together."""

_OF_TUTORIAL = (
    "the output of one run; `tests/packages/test_tutorials.py` runs the commands and holds a least "
    "accuracy"
)

OTHER = {
    "finetune-pictures.md": _OF_TUTORIAL,
    "finetune-text.md": _OF_TUTORIAL,
    "steps.md": "milliseconds of training steps, which `tests/test_step_figures.py` holds "
    "against the stored history",
    "recipes.md": "a default",
    "security.md": "shares of a processor's time that `benchmarks.run identity` printed, with the "
    "date and the machine",
    "whalefl.md": "a setting",
}
"""Documents whose small decimals are not of stored runs, and what they are."""

SHARES_OF_BYTES = r"\| (?:`\w+`|\w+) \| `(?:fp32|fp16|bf16|int8|int4|topk 0\.\d+)` \|"
"""Rows whose shares `tests/documents/stored_tables.py` computes from the stored bytes."""


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, float):
        yield value


@pytest.fixture(scope="module")
def stored() -> list[float]:
    """All that the files beside the documents have."""
    files = [*(DOCS / "benchmarks" / "data").glob("*.json"), *CHECKS.glob("*.json")]
    found = [number for path in files for number in numbers(json.loads(path.read_text()))]
    cells = (
        row
        for path in (DOCS / "results").rglob("*.csv")
        for row in path.read_text().replace("\n", ",").split(",")
    )
    return found + [float(cell) for cell in cells if re.fullmatch(r"\d+\.\d+", cell)]


def untraced(text: str, known: list[float]) -> list[str]:
    """The shares in a text, beside settings and shares of bytes, that none of the numbers rounds
    to.
    """
    lines = [
        line
        for line in text.splitlines()
        if not re.match(SHARES_OF_BYTES, line) and not re.match(r"\w+ = ", line)
    ]
    rounded = {f"{number:.{digits}f}" for number in known for digits in (3, 4)}
    return [share for line in lines for share in SHARE.findall(line) if share not in rounded]


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.stem)
def test_every_accuracy_is_of_a_stored_run(path, stored):
    """Who measures something stores it; a figure that nobody can trace has no place in a
    document.
    """
    found = untraced(path.read_text(), [*stored, *COMPUTED.get(path.name, [])])
    assert (path.name in OTHER and bool(found)) or found == []


def test_a_figure_that_nobody_stored_is_found(stored):
    assert untraced("It ends at 0.98765 and 0.9871, after 0.5 s.", [0.12]) == ["0.9871"]
    assert untraced("learning_rate = 0.0123\n| heterofl | `int8` | 7.7 | 0.261 |", []) == []
    assert len(stored) > 500


@pytest.mark.parametrize("experiment", TABLES.values(), ids=TABLES)
def test_what_was_checked_of_a_table_names_stored_figures(experiment):
    """Every percentage and difference in points that a table's paragraphs name, if they name
    any.
    """
    folder = DOCS / "results" / experiment.table
    rows = read_rows(folder / f"{experiment.table}.csv")
    known = {
        f"{value:.2f}"
        for row in rows
        for value in (row.best, row.last, row.decides)
        if value is not None
    }
    said = re.findall(r"(?<![\w.])\d+\.\d+(?= %| points)", " ".join(experiment.checked))
    assert [
        figure for figure in said if f"{float(figure):.2f}" not in known and figure != "0.11"
    ] == []


@pytest.mark.parametrize(
    ("table", "checks"), [("fedrolex-4", "checks"), ("fedrolex-3", "checks of fedrolex-3")]
)
def test_what_was_checked_of_fedrolex_is_of_stored_runs(table, checks):
    """Where both arms end with more rounds, and what lies between them then and before, for the one
    seed.
    """
    text, lacking = TABLES[table].checked
    assert not re.search(r"\d\.\d", lacking)
    (check,) = json.loads((CHECKS / "fedrolex-checks.json").read_text())[checks]
    other, rolling = (100 * fmean(run["accuracy"][-4:]) for run in check["runs"])
    rows = read_rows(DOCS / "results" / table / f"{table}.csv")
    arms = {run["arm"] for run in check["runs"]}
    before = [
        row.decides for row in rows if row.figure == "global" and row.seed == 1 and row.arm in arms
    ]
    told = [float(figure) for figure in re.findall(r"\d+\.\d\d", text)]
    assert told == pytest.approx(
        [rolling, other, other - rolling, abs(before[0] - before[1])], abs=0.0051
    )


def test_what_was_checked_of_fml_is_of_stored_runs():
    """Each accuracy in that paragraph, the mean of the last two evaluations, and no other."""
    stored = json.loads((CHECKS / "fml-checks.json").read_text())
    rows = read_rows(DOCS / "results" / "fml-1" / "fml-1.csv")
    *texts, unstored, lacking = TABLES["fml-1"].checked
    assert not re.search(r"\d\.\d", unstored + lacking)
    for text, cell, checks in zip(
        texts,
        ("mnist-mlp/iid", "cifar10-cnn1/iid"),
        (stored["checks"], stored["checks of cifar10-cnn1"]),
        strict=True,
    ):
        means = [
            100 * fmean(fmean(run["accuracy"][-2:]) for run in check["runs"]) for check in checks
        ]
        for arm in (f"fml/{cell}", f"fedavg/{cell}"):
            own = [row for row in rows if (row.arm, row.figure) == (arm, "global")]
            means += [fmean(row.decides for row in own), own[0].published]
        assert {f"{mean:.2f}" for mean in means} == set(re.findall(r"\b\d\d\.\d\d\b", text))
