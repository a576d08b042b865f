"""Makes data as boards would have it: three unequal parts of scikit-learn's digits, a test set."""

from pathlib import Path

import numpy as np

from simulation.data.datasets import load_dataset
from simulation.data.partition import dirichlet

HERE = Path(__file__).parent

if __name__ == "__main__":
    digits = load_dataset("digits")
    (HERE / "data").mkdir(exist_ok=True)
    for name, samples in zip(
        ("attic", "barn", "cellar"), dirichlet(digits.train_y, 3, 1.0, seed=7), strict=True
    ):
        np.savez(
            HERE / "data" / f"{name}.npz", x=digits.train_x[samples], y=digits.train_y[samples]
        )
        print(f"{name}: {len(samples)} samples")
    np.savez(HERE / "data" / "test.npz", x=digits.test_x, y=digits.test_y)
