"""Command line of the conformance run; see `tests.conformance`."""

import argparse
import sys
from pathlib import Path

from fleet_protocol.errors import DataError
from tests.conformance.entry import read_entries
from tests.conformance.suite import Verdict, run_entry

__all__ = ["main"]

_FAILED = 1
_UNREADABLE = 2


def main(arguments: list[str] | None = None) -> int:
    """Run every entry of a file and print the results.

    Args:
        arguments: of the command line; those of the process if omitted.

    Returns:
        0 if nothing failed, 1 if something did, 2 if the file cannot be read.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance",
        description="Run worked examples through the product's own code.",
    )
    parser.add_argument("file", type=Path, help="JSON file of worked examples")
    options = parser.parse_args(arguments)
    try:
        entries = read_entries(options.file)
    except DataError as error:
        print(error, file=sys.stderr)
        return _UNREADABLE
    counts = dict.fromkeys(Verdict, 0)
    for entry in entries:
        outcome = run_entry(entry)
        counts[outcome.verdict] += 1
        print(outcome.line, flush=True)
    print(
        f"{len(entries)} entries: {counts[Verdict.PASS]} pass, {counts[Verdict.FAIL]} FAIL,"
        f" {counts[Verdict.NOT_APPLICABLE]} not applicable"
    )
    return _FAILED if counts[Verdict.FAIL] else 0


if __name__ == "__main__":
    sys.exit(main())
