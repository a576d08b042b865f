"""Writes docs/benchmarks/data/robust-merging.json: MNIST with ten devices of which some lie, under several settings
of ``[robust]``.

    SHOAL_DATA=/path/to/data python -m tests.simulation.attack_figures

Takes some minutes. The table in docs/benchmarks/robustness.md is compared with the file by
tests/documents/stored_tables.py.
"""

import json
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from unittest import mock

from simulation import runner
from simulation.engines import open_engine
from tests.simulation.attackers import LyingEngine, times
from tests.simulation.simulations import settings

FILE = Path(__file__).parents[2] / "docs" / "benchmarks" / "data" / "robust-merging.json"
LIARS = ("device-0", "device-4", "device-7")
UNBOUND = {"norm_bound": 0}
ROBUST: dict[str, dict[str, Any]] = {
    "norm_bound = 0": UNBOUND,
    "the defaults": {},
    'merge = "krum", faulty = 0.3': {**UNBOUND, "merge": "krum", "faulty": 0.3},
    'merge = "trimmed_mean", faulty = 0.3': {**UNBOUND, "merge": "trimmed_mean", "faulty": 0.3},
    'merge = "median"': {**UNBOUND, "merge": "median"},
}
THREE = ((3, 10), (3, -10), (3, -1))  # how many lie, and their factor
ATTACKS = {"norm_bound = 0": ((0, 1), (1, -10), *THREE), "the defaults": ((0, 1), (1, -10), *THREE)}
TABLES: dict[str, Any] = {
    "model": {"arch": "mlp", "settings": {"hidden": (64, 64)}, "widths": (1.0,)},
    "data": {"name": "mnist", "train_limit": 3000, "test_limit": None},
    "partition": {"kind": "iid"},
    "devices": {"count": 10},
    "round": {"rounds": 10, "fraction": 1.0},
    "train": {"epochs": 1, "batch_size": 16, "learning_rate": 0.1},
    "tiers": {"assign": "capacity", "levels": None},
    "evaluation": {"every": 10},
    "engine": {"workers": 1},
}


def accuracy(folder: Path, liars: int, factor: float, robust: dict[str, Any]) -> float:
    """Of the last version on the test images; of a run that came to no end that of chance, 0.1."""
    attacks = dict.fromkeys(LIARS[:liars], times(factor))

    def opened(table: Any, setup: Any) -> LyingEngine:
        return LyingEngine(open_engine(table, setup), setup.updates.parent, attacks)

    with (
        mock.patch.object(runner, "open_engine", opened),
        tempfile.TemporaryDirectory(dir=folder) as out,
    ):
        finished = runner.simulate(
            settings(Path(out) / "run", folder / "cache", **TABLES, robust=robust)
        ).finished
    return 0.1 if finished.evaluation is None else finished.evaluation.accuracy


def main() -> None:
    """Simulate, and write the file."""
    runs = []
    with tempfile.TemporaryDirectory() as name:
        for robust, table in ROBUST.items():
            for liars, factor in ATTACKS.get(robust, THREE):
                found = round(accuracy(Path(name), liars, factor, table), 4)
                runs.append({"robust": robust, "liars": liars, "factor": factor, "accuracy": found})
                print(runs[-1], flush=True)
    date = datetime.now(timezone.utc).date().isoformat()
    FILE.write_text(
        json.dumps({"date": date, "test_images": 10_000, "tables": TABLES, "runs": runs}, indent=1)
        + "\n"
    )


if __name__ == "__main__":
    main()
