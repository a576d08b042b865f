"""`make proofs`: all that CI leaves out; it goes on after a failure, and names at the end what
failed.

    python -m tests.proofs [NAME=VALUE ...] PROOF...

A proof is a target of the Makefile, and settings are passed on to it. Where it is a suite, its
failed tests are named. Two proofs run side by side, because a third of their time is waiting. The
output of each is in `build/proofs` while it runs, and is printed in one piece when it ends.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Outcome", "main"]

MAKE = ("make", "--no-print-directory")
SIDE_BY_SIDE = 2
LOGS = Path("build", "proofs")


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
    """Run one proof to its end, whether it passes or fails."""
    began = time.monotonic()
    with log_of(proof).open("w") as log:
        done = subprocess.run(
            [*MAKE, proof, *settings], stdout=log, stderr=subprocess.STDOUT, check=False
        )
    return Outcome(proof, done.returncode == 0, (time.monotonic() - began) / 60)


def log_of(proof: str) -> Path:
    """The file that keeps a proof's output."""
    return LOGS / f"{proof}.log"


def run_all(proofs: list[str], settings: list[str]) -> Iterator[Outcome]:
    """Start the proofs in their order; yield each outcome when its proof ends."""
    LOGS.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(SIDE_BY_SIDE) as lanes:
        running = [lanes.submit(run, proof, settings) for proof in proofs]
        for ended in as_completed(running):
            yield ended.result()


def main(arguments: list[str]) -> int:
    """Run the proofs that are named, and print how each ended.

    Returns:
        0 if all passed, 1 if one failed.
    """
    settings = [argument for argument in arguments if "=" in argument]
    proofs = [argument for argument in arguments if "=" not in argument]
    outcomes = {}
    for outcome in run_all(proofs, settings):
        outcomes[outcome.proof] = outcome
        print(f"\n=== {outcome.proof}\n{log_of(outcome.proof).read_text()}", flush=True)
    print("\n=== proofs")
    for proof in proofs:
        print("\n".join(outcomes[proof].lines()))
    return 0 if all(outcome.passed for outcome in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
