"""`make proofs` goes on after a failure, and names what failed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAKEFILE = """
good:
\t@echo "with $(SIZE)"
suite:
\t@{python} -m pytest -q -p no:xdist -o cache_dir=.pytest_cache/$@ test_two.py
"""
TESTS = """
def test_right():
    pass


def test_wrong():
    assert False
"""


@pytest.fixture
def proofs(tmp_path):
    """Runs proofs of a small Makefile."""
    (tmp_path / "Makefile").write_text(MAKEFILE.format(python=sys.executable))
    (tmp_path / "test_two.py").write_text(TESTS)

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "tests.proofs", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


def test_what_failed_is_named_at_the_end(proofs):
    """Also a target that does not exist; what comes after a failure runs. Outcomes come in the
    order of the call, whichever proof ends first.
    """
    done = proofs("suite", "SIZE=5", "missing", "good")
    assert done.returncode == 1
    assert "with 5" in done.stdout
    summary = re.sub(r" +[\d.]+ min", "", done.stdout.partition("=== proofs\n")[2])
    assert [line.strip() for line in summary.splitlines()] == [
        "FAILED  suite",
        "test_two.py::test_wrong",
        "FAILED  missing",
        "passed  good",
    ]


def test_proofs_that_all_pass_end_with_0(proofs):
    """And nothing is said to have failed."""
    done = proofs("good")
    assert done.returncode == 0
    assert "FAILED" not in done.stdout


def test_every_suite_and_target_of_proof_is_run():
    """CI and `make proofs` together run each target that can fail; those that measure are run by
    whoever reads them.
    """
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"(?m)^([a-z-]+):.*## ", makefile))
    proofs = set(re.search(r"(?m)^PROOFS := (.*)$", makefile)[1].split())
    ci = (
        set(re.search(r"make --jobs 2 .*", (ROOT / ".ci" / "run").read_text())[0].split()) & targets
    )
    measuring = {"bench", "mutants", "readability", "results-check"}
    using = {"board", "demo", "docs", "notebooks", "proofs"}
    assert targets - proofs - ci == measuring | using
    assert proofs <= targets
