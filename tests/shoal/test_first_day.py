"""A newcomer's first day: an own CNN with batch norm on pictures of two sizes, a table with text
labels and gaps, and a regression, on three boards each, up to the load in plain PyTorch.
"""

import csv
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.brokers import free_port

ROOT = Path(__file__).parents[2]
BOARDS = ("attic", "barn", "cellar")
INSTALLATION = 3  # git clone, make install, activate
MOST_COMMANDS = 15
PATIENCE = 500  # seconds

MODEL = """
from torch import nn
from shoal import Cut, architecture

@architecture()
def pictures(cut: Cut, *, input_shape=(3, 8, 8), classes=2) -> nn.Module:
    width = cut.width("width", 8)
    return nn.Sequential(
        nn.Conv2d(input_shape[0], width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, cut.classes(classes)),
    )

@architecture()
def table(cut: Cut, *, input_shape=(4,), classes=2) -> nn.Module:
    width = cut.width("width", 16)
    return nn.Sequential(
        nn.Linear(input_shape[0], width), nn.ReLU(), nn.Linear(width, cut.classes(classes))
    )

@architecture()
def price(cut: Cut, *, input_shape=(4,)) -> nn.Module:
    width = cut.width("width", 16)
    return nn.Sequential(nn.Linear(input_shape[0], width), nn.ReLU(), nn.Linear(width, 1))
"""
DATA = {
    "pictures": 'kind = "images"\npath = "pictures/{who}"\nsize = [20, 20]\nscale = 0.004',
    "table": 'kind = "csv"\npath = "table/{who}.csv"\nlabel_column = "risk"\nmissing = 0',
    "price": 'kind = "csv"\npath = "price/{who}.csv"\nlabel_column = "price"',
}
RECIPE = {"price": '[model.recipe]\nloss = "mean-squared-error"\n'}


def write_data(folder, task, who, draw):
    """What a board, or the server for its test set, has of a task."""
    if task == "pictures":
        for index in range(12):
            side = 24 if index % 3 else 32
            label = ("dark", "bright")[index % 2]
            pixels = draw.integers(0, 60, (side, side, 3)) + 150 * (index % 2)
            path = folder / task / who / label / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.astype(np.uint8)).save(path)
        return
    (folder / task).mkdir(exist_ok=True)
    with (folder / task / f"{who}.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["age", "weight", "tone", "count", "risk" if task == "table" else "price"])
        for number, row in enumerate(np.round(draw.normal(size=(40, 4)), 3)):
            value = float(row[0] + row[1])
            cells = list(row)
            if task == "table":
                cells[2] = "" if number % 7 == 0 else cells[2]
                value = "high" if value > 0 else "low"
            rows.writerow([*cells, value])


def write_task(folder, task, port):
    """The configurations of a task, beside those of other tasks, and its data."""
    draw = np.random.default_rng(3)
    (folder / "model.py").write_text(MODEL)
    for who in (*BOARDS, "test"):
        write_data(folder, task, who, draw)
    (folder / f"{task}.toml").write_text(
        f'fleet = "lab"\nstore = "{task}-store"\n[broker]\nport = {port}\n'
        f'[model]\narch = "{task}"\n{RECIPE.get(task, "")}'
        '[model.export]\nmodels = "model.py"\nwidths = [1, 0.5]\n'
        "[round]\nrounds = 2\nmin_devices = 3\n[train]\nbatch_size = 4\n"
        f"[evaluation.data]\n{DATA[task].format(who='test')}\n"
    )
    for board in BOARDS:
        (folder / f"{task}-{board}.toml").write_text(
            f'fleet = "lab"\ndevice = "{board}"\nbroker = "mqtt://127.0.0.1:{port}"\n'
            f'state_dir = "state/{task}-{board}"\n[data]\n{DATA[task].format(who=board)}\n'
        )


def typed(folder, *words):
    """The output of a command that must succeed."""
    program = [sys.executable, "-m", "shoal"] if words[0] == "shoal" else [sys.executable]
    done = subprocess.run(
        [*program, *words[1:]],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


def commands_of(task):
    """The three commands of a task; the last one runs the lines that the second prints."""
    boards = [word for board in BOARDS for word in ("--board", f"{task}-{board}.toml")]
    out = f"{task}.pt"
    return [
        ("shoal", "run", "--config", f"{task}.toml", *boards),
        ("shoal", "export-weights", "--store", f"{task}-store", "--format", "torch", "--out", out),
        ("python", "load.py"),
    ]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("task", DATA)
def test_three_commands_lead_from_files_to_the_original_class(tmp_path, task):
    """They were eleven a task, and thirty-three a day."""
    write_task(tmp_path, task, free_port())
    train, export, load = commands_of(task)
    assert "finished after 2 rounds" in typed(tmp_path, *train)
    lines = [line.strip() for line in typed(tmp_path, *export).splitlines()[1:]]
    shape = {"pictures": (5, 3, 20, 20), "table": (5, 4), "price": (5, 4)}[task]
    lines.append(f"print(tuple(model(torch.zeros{shape}).shape))")
    (tmp_path / "load.py").write_text("\n".join(lines))
    assert typed(tmp_path, *load) == ("(5, 1)\n" if task == "price" else "(5, 2)\n")


def test_a_day_is_fifteen_commands_at_most():
    """For three tasks, with the installation."""
    count = sum(len(commands_of(task)) for task in DATA)
    assert INSTALLATION + count <= MOST_COMMANDS
