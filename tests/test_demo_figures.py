"""The accuracies of the demo in the README are those of the stored runs (`docs/demo.json`)."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
RUNS = json.loads((ROOT / "docs" / "demo.json").read_text())["runs"]
ARMS = ("global", "all_small", "exclusive")


def test_the_table_is_that_of_the_stored_runs():
    """A row for every seed, and their mean."""
    section = README.partition("`make demo` is 1):")[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line[:1] == "|"]
    runs = [run for run in RUNS if run["data"] == "digits"]
    expected = [[str(run["seed"]), *(f"{run['accuracy'][arm]:.4f}" for arm in ARMS)] for run in runs]
    means = [sum(run["accuracy"][arm] for run in runs) / len(runs) for arm in ARMS]
    assert cells[2:] == [*expected, ["mean", *(f"{mean:.4f}" for mean in means)]]


def test_the_accuracies_on_mnist_are_those_of_the_stored_run():
    """After the rounds that the sentence names."""
    said = re.search(r"global accuracy (\S+) after round (\d+) and (\S+) after round (\d+)", README)
    assert said is not None
    (run,) = (run for run in RUNS if run["data"] == "mnist")
    told = {int(number): float(accuracy) for accuracy, number in (said.group(1, 2), said.group(3, 4))}
    assert told == {int(number): accuracy for number, accuracy in run["by_round"].items()}
