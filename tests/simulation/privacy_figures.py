"""Writes docs/benchmarks/data/privacy.json: MNIST with five hundred devices and noise of several sizes, by three
seeds.

    SHOAL_DATA=/path/to/data python -m tests.simulation.privacy_figures

Takes half an hour. The table in docs/privacy.md is compared with the file by
tests/documents/stored_tables.py.
"""

import json
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from simulation.runner import simulate
from tests.simulation.simulations import settings

FILE = Path(__file__).parents[2] / "docs" / "benchmarks" / "data" / "privacy.json"
SEEDS = (1, 2, 3)
CLIP = 0.5
NOISES = (None, 0.3, 1.0, 3.0, 10.0)  # multipliers; None for a run without [privacy]
TABLES: dict[str, Any] = {
    "model": {"arch": "mlp", "settings": {"hidden": (64,)}, "widths": (1.0, 0.5)},
    "data": {"name": "mnist", "train_limit": 20_000, "test_limit": None},
    "partition": {"kind": "iid"},
    "devices": {"count": 500},
    "round": {"rounds": 10, "fraction": 1.0},
    "train": {"epochs": 1, "batch_size": 10, "learning_rate": 0.1},
    "tiers": {"assign": "fix", "levels": "a1-b1"},
    "evaluation": {"every": 10},
    "engine": {"workers": 1},
    "keep_versions": 1,
}


def run(folder: Path, seed: int, noise: float | None) -> dict[str, Any]:
    """One simulation: accuracy on all test images and epsilon after its last round."""
    hidden: dict[str, Any] = {}
    if noise is not None:
        hidden = {"privacy": {"clip": CLIP, "noise_multiplier": noise}, "robust": {"norm_bound": 0}}
    with tempfile.TemporaryDirectory(dir=folder) as out:
        last = simulate(
            settings(Path(out) / "run", folder / "cache", **TABLES, seed=seed, **hidden)
        ).rounds[-1]
    epsilon = None if last.epsilon is None else round(last.epsilon, 2)
    return {
        "seed": seed,
        "noise_multiplier": noise,
        "accuracy": round(last.accuracy or 0, 4),
        "epsilon": epsilon,
    }


def main() -> None:
    """Simulate, and write the file."""
    runs = []
    with tempfile.TemporaryDirectory() as name:
        for noise in NOISES:
            for seed in SEEDS:
                runs.append(run(Path(name), seed, noise))
                print(runs[-1], flush=True, file=sys.stderr)
    date = datetime.now(timezone.utc).date().isoformat()
    made = {"date": date, "clip": CLIP, "test_images": 10_000, "tables": TABLES, "runs": runs}
    FILE.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
