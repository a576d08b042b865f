"""`make proofs`: all that CI leaves out; it goes on after a failure, and says at the end what
failed.

    python -m tests.proofs [NAME=VALUE ...] PROOF...

A proof is a target of the Makefile, and settings are passed on to it. Where it is a suite, its
failed tests are named.
"""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Outcome", "main"]

MAKE = ("make", "--no-print-directory")


@dataclass(frozen=True)
class Outcome:
    """How one proof ended.

    Attributes:
        proof: target of the Makefile.
        passed: whether it ended with 0.
        minutes: how long it took.
    """

    proof: str
    passed: bool
    minutes: float

    def lines(self) -> list[str]:
        """A line for the proof, and one for each of its tests that failed."""
        ending = "passed" if self.passed else "FAILED"
        return [f"{ending}  {self.minutes:6.1f} min  {self.proof}", *self._failed_tests()]

    def _failed_tests(self) -> list[str]:
        """What pytest keeps of the suite; those that passed since are not in it."""
        memory = Path(".pytest_cache", self.proof, "v", "cache", "lastfailed")
        if self.passed or not memory.is_file():
            return []
        return [f"                    {test}" for test in sorted(json.loads(memory.read_text()))]


def run(proof: str, settings: list[str]) -> Outcome:
    """Run one proof to its end, whatever that is."""
    print(f"\n=== {proof}", flush=True)
    began = time.monotonic()
    done = subprocess.run([*MAKE, proof, *settings], check=False)
    return Outcome(proof, done.returncode == 0, (time.monotonic() - began) / 60)


def main(arguments: list[str]) -> int:
    """Run the proofs that are named, and say how each ended.

    Returns:
        0 if all passed, 1 if one failed.
    """
    settings = [argument for argument in arguments if "=" in argument]
    proofs = [argument for argument in arguments if "=" not in argument]
    outcomes = [run(proof, settings) for proof in proofs]
    print("\n=== proofs")
    for outcome in outcomes:
        print("\n".join(outcome.lines()))
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
