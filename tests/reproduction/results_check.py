"""``make results-check``: runs one stored arm at a new seed, and sees whether it lies where the
stored seeds say.

The arm is the quickest that is stored with three seeds or more, or one that is named. A new seed
lies within Student's interval of 95 % for one more value around the stored ones, so of twenty runs
that are as they were one is outside.
"""

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scipy import stats

from reproduction.power import UPPER_TAIL
from reproduction.running import TablePart, collect, jobs, run_job
from reproduction.stored import Row, read_rows, rows_of
from reproduction.table_file import TABLES

RESULTS = Path(__file__).parents[2] / "docs" / "results"
_SEEDS = 3


@dataclass(frozen=True)
class Compared:
    """A figure of the new run, and where it should be."""

    figure: str
    value: float
    low: float
    high: float

    @property
    def inside(self) -> bool:
        return self.low <= self.value <= self.high

    def __str__(self) -> str:
        verdict = "as stored" if self.inside else "OUTSIDE"
        return (
            f"{self.figure}: {self.value:.3f}, stored seeds say {self.low:.3f} to "
            f"{self.high:.3f}: {verdict}"
        )


def chosen(folder: Path, wanted: str = "") -> tuple[Row, ...]:
    """The rows of the arm to run, ``table arm``: the quickest stored with enough seeds, or the one
    that is wanted.
    """
    found: dict[tuple[str, str], list[Row]] = {}
    for table in TABLES:
        for row in read_rows(folder / table / f"{table}.csv"):
            found.setdefault((row.table, row.arm), []).append(row)
    enough = {key: rows for key, rows in found.items() if len({row.seed for row in rows}) >= _SEEDS}
    if wanted:
        enough = {key: rows for key, rows in enough.items() if " ".join(key) == wanted}
    if not enough:
        sys.exit(f"no arm {wanted!r} is stored with {_SEEDS} seeds or more below {folder}")
    return tuple(
        min(enough.values(), key=lambda rows: statistics.fmean(row.seconds for row in rows))
    )


def compared(stored: Sequence[Row], new: Sequence[Row]) -> list[Compared]:
    """Every figure of a new run that all stored seeds have; what earlier versions did not store is
    not asked for.
    """
    found = []
    for row in new:
        before = [old for old in stored if old.figure == row.figure]
        for name in ("decides", "last", "best"):
            known = [getattr(old, name) for old in before]
            value = getattr(row, name)
            if value is not None and len(known) >= _SEEDS and None not in known:
                half = stats.t.ppf(UPPER_TAIL, len(known) - 1) * statistics.stdev(known)
                half *= (1 + 1 / len(known)) ** 0.5
                mean = statistics.fmean(known)
                found.append(Compared(f"{row.figure}, {name}", value, mean - half, mean + half))
                break
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "arm", nargs="?", default="", help="table and arm, for example 'fml-1 fml/mnist-mlp/iid'"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    stored = chosen(options.results, options.arm)
    table = stored[0].table
    arm = stored[0].arm
    scale = stored[0].scale
    used = {row.seed for row in stored}
    seed = random.SystemRandom().choice(
        [number for number in range(1, 10_000) if number not in used]
    )
    print(
        f"{table}, arm {arm}, scale {scale}, seed {seed}; stored: "
        f"{', '.join(map(str, sorted(used)))}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        (job,) = jobs(TABLES[table], scale, Path(folder), TablePart((seed,), (arm,)))
        run_job(
            job,
            watch=lambda row: print(f"round {row.round} of {job.config.round.rounds}", flush=True),
        )
        found = compared(
            stored, rows_of(TABLES[table], scale, collect(TABLES[table], scale, Path(folder)))
        )
    print(*found, sep="\n")
    return 0 if found and all(item.inside for item in found) else 1


if __name__ == "__main__":
    sys.exit(main())
