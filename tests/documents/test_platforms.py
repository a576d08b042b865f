"""The table of what ran where is that of the stored runs, and each says when, and on what
kind of machine.
"""

import datetime as dt
import json
import shutil

import pytest

from tests.documents.platforms import (
    HEAD,
    PAGE,
    SUITES,
    ended,
    read_rows,
    rewritten,
    table_of,
    taken_over,
)


def test_the_table_is_that_of_the_stored_runs():
    """`make docs` writes it."""
    text = PAGE.read_text()
    assert table_of(read_rows()) in text
    assert rewritten(text, read_rows()) == text
    other = [row | {"date": "2020-01-01"} for row in read_rows()]
    assert rewritten(text, other).count("2020-01-01") == len(other)


def test_every_row_says_when_and_on_what():
    """Nothing is in the table that did not run, unless it says so; and each suite has a row."""
    rows = read_rows()
    for row in rows:
        assert row["how"] in {"hardware", "emulated", "not run"}
        assert dt.date.fromisoformat(row["date"]) <= dt.datetime.now(dt.timezone.utc).date()
        assert ("qemu" in row["where"]) == (row["how"] == "emulated")
    assert {row["suite"] for row in rows if "suite" in row} == set(SUITES.values())


@pytest.mark.parametrize("marks", [*SUITES, "slow"])
def test_a_suite_that_passes_leaves_its_row(marks, tmp_path):
    """With today's date; one that is no suite of the table leaves nothing."""
    if marks == "arm" and not shutil.which("qemu-system-aarch64"):
        pytest.skip("qemu is not installed, without which that suite does not run")
    ended(marks, tmp_path / "build")
    rows = [
        {
            "suite": SUITES.get(marks, "-"),
            "part": "p",
            "where": "w",
            "how": "not run",
            "date": "d",
            "ran": "r",
        }
    ]
    (row,) = taken_over(rows, tmp_path / "build")
    if marks == "slow":
        assert [row] == rows
        return
    today = dt.datetime.now(dt.timezone.utc).date().isoformat()
    assert (row["part"], row["ran"], row["date"]) == ("p", "r", today)
    assert ("qemu" in row["where"]) == (row["how"] == "emulated") == (marks == "arm")
    assert table_of([row]).startswith(HEAD)
    json.dumps(row)
