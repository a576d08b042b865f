"""Simulations: speed against a plain PyTorch loop, overhead outside training, and memory.

Speed: HeteroFL on MNIST with `conv`, 100 devices of which 10 train in a round, levels a to e drawn
for every round, 5 local epochs of batches of 10 (specification 1.8), with 300 samples a device to
keep it short. The loop is what a published research script does: one process, PyTorch on all cores,
one device after the other. The simulation has one worker per core, and does all that it does
without a benchmark: the store, the checks, the history. Without SHOAL_DATA both train on made-up
images, which take the same time.

Overhead: with one worker, the share of a round in which no device trains; starting the worker, once
in a simulation, is a separate row.

Memory: 1,000 devices train `conv` at width 1/16 in every round; resident memory of all processes
together, where pages that they share count for each.
"""

import gzip
import os
import struct
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch.nn import functional

from benchmarks.row import Row
from models import Registry, build
from models.plan import compile_plan, make_plan
from models.registry import infer_layout
from models.tier import Tier
from models.zoo.layers import set_mode
from reproduction.experiment import merged
from simulation.data.held import SampleSplit
from simulation.preparing import prepare
from simulation.results.history import read_devices
from simulation.results.rounds import RoundRow
from simulation.runner import SimulationResult, simulate
from simulation.settings import SimulationConfig

DEVICES = 100
SAMPLES = 300
TIMED = 3
SPEED_BUDGET = 2.5
WIDTHS = (1.0, 0.5, 0.25, 0.125, 0.0625)
MEMORY_DEVICES = 1000
MEMORY_ROUNDS = 8
MEMORY_BUDGET_GB = 2.0
GB = 1024**3
MB = 1024**2


def rows() -> list[Row]:
    """Speed of both backends, overhead and memory."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        data = data_root(root)
        return [*speed(root, data), *overhead(root, data), *memory(root, data)]


def data_root(folder: Path) -> Path:
    """The folder that SHOAL_DATA names, or one with made-up images in MNIST's format."""
    named = os.environ.get("SHOAL_DATA")
    if named and (Path(named) / "mnist").is_dir():
        return Path(named)
    draw = np.random.default_rng(0)
    (folder / "made-up" / "mnist").mkdir(parents=True)
    for stem, count in (("train", 60_000), ("t10k", 10_000)):
        for kind, values in (
            ("images-idx3", draw.integers(0, 256, (count, 28, 28), np.uint8)),
            ("labels-idx1", draw.integers(0, 10, count, np.uint8)),
        ):
            head = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
            path = folder / "made-up" / "mnist" / f"{stem}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(head + values.tobytes(), 1))
    return folder / "made-up"


def settings(root: Path, sets: Path, name: str, **tables: Mapping[str, Any]) -> SimulationConfig:
    """HeteroFL's MNIST experiment; tables that are given are merged into its own."""
    base: dict[str, Any] = {
        "model": {"arch": "conv", "widths": WIDTHS},
        "data": {
            "name": "mnist",
            "root": sets,
            "train_limit": DEVICES * SAMPLES,
            "test_limit": 500,
        },
        "devices": {"count": DEVICES},
        "round": {"rounds": TIMED + 1, "fraction": 0.1},
        "train": {"epochs": 5, "batch_size": 10, "learning_rate": 0.01},
        "tiers": {"assign": "dynamic", "levels": "a1-b1-c1-d1-e1"},
        # Only the last round, which is not timed, is evaluated.
        "evaluation": {"every": 1000, "statistics_fraction": 0.02},
    }
    return SimulationConfig.model_validate(
        merged(base, {"out": root / name, "cache": root / "cache"}, tables)
    )


def speed(root: Path, data: Path) -> list[Row]:
    """Return processor time of the loop over each backend's, same devices, from round 2 on."""
    used: dict[str, list[float]] = {"onnx": [], "torch": []}
    for backend, seen in used.items():
        config = settings(root, data, backend, engine={"backend": backend})
        # A simulation is deterministic: both have the devices and levels of this one.
        result = simulate(config, watch=partial(_note, seen))
    loop = loop_seconds(config, result)
    ours: dict[str, float] = {}
    for name, seen in used.items():
        ours[name] = seen[TIMED - 1] - seen[0]
    fastest = min(ours.values())
    rows = []
    for name, seconds in ours.items():
        row = Row(
            f"simulation speed {name}/PyTorch loop",
            loop / seconds,
            "ratio, CPU",
            SPEED_BUDGET if seconds == fastest else None,  # one backend is enough
            at_least=True,
            note=f"{loop:.1f} / {seconds:.1f} s of CPU",
        )
        rows.append(row)
    return rows


def _note(seen: list[float], _row: RoundRow) -> None:
    """Add the processor time of this process and its children so far, also of ended children."""
    process = psutil.Process()
    own = process.cpu_times()
    seconds = own.user + own.system
    for child in process.children(recursive=True):
        times = child.cpu_times()
        seconds += times.user + times.system
    seen.append(seconds + own.children_user + own.children_system)


def loop_seconds(config: SimulationConfig, result: SimulationResult) -> float:
    """Return the processor time of a plain loop over the same devices and levels.

    They are those that the simulation had in its timed rounds.
    """
    prepared = prepare(config)
    x = torch.from_numpy(np.load(prepared.data / "train_x.npy"))
    y = torch.from_numpy(np.load(prepared.data / "train_y.npy"))
    split = SampleSplit.load(prepared.split)
    samples = list(map(torch.from_numpy, split.train))
    device_numbers = dict(zip(config.devices.ids, range(config.devices.count), strict=True))
    arch = Registry.zoo().get("conv")
    layout = infer_layout(arch, prepared.settings)
    plans = {}
    for width in WIDTHS:
        plan = make_plan(layout, layout.tier(width))
        plans[width] = compile_plan(layout, plan)
    first_model = build(arch, settings=prepared.settings)
    weights = {}
    for name, value in first_model.named_parameters():
        weights[name] = value.detach().numpy().copy()
    seconds = 0.0
    for number in range(2, TIMED + 1):
        asked = [row for row in read_devices(result.folder) if row.round == number]
        began = time.process_time()
        sums = _Sums.zeros_like(weights)
        for row in asked:
            width = Tier.parse(row.tier).width
            module = build(arch, width, settings=prepared.settings)
            indices = samples[device_numbers[row.device]]
            slices = plans[width].slice(weights)
            sums.add(local_training(module, slices, x[indices], y[indices]))
        weights = sums.mean(weights)
        seconds += time.process_time() - began
    return seconds


@dataclass(frozen=True)
class _Sums:
    """The sums of a plain HeteroFL merge, and how many devices hold each entry."""

    values: dict[str, NDArray[Any]]
    counts: dict[str, NDArray[Any]]

    @classmethod
    def zeros_like(cls, weights: Mapping[str, NDArray[Any]]) -> "_Sums":
        sums = cls({}, {})
        for name, value in weights.items():
            sums.values[name] = np.zeros_like(value)
            sums.counts[name] = np.zeros_like(value)
        return sums

    def add(self, trained: Mapping[str, NDArray[Any]]) -> None:
        for name, value in trained.items():
            corner = tuple(slice(0, size) for size in value.shape)
            self.values[name][corner] += value
            self.counts[name][corner] += 1

    def mean(self, old: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return the mean of every entry; entries that no device holds stay as they were."""
        weights = {}
        for name, value in old.items():
            count = self.counts[name]
            mean = self.values[name] / np.maximum(count, 1)
            weights[name] = np.where(count > 0, mean, value)
        return weights


def local_training(
    module: torch.nn.Module,
    weights: Mapping[str, NDArray[Any]],
    x: torch.Tensor,
    y: torch.Tensor,
) -> dict[str, NDArray[Any]]:
    """Five epochs of one device, as a research script writes them."""
    set_mode(module, "train")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.from_numpy(np.array(weights[name])))
    optimizer = torch.optim.SGD(module.parameters(), 0.01, momentum=0.9, weight_decay=5e-4)
    mask = torch.zeros(10)
    mask[y.unique()] = 1
    for _ in range(5):
        for indices in torch.randperm(len(y)).split(10):
            optimizer.zero_grad()
            functional.cross_entropy(module(x[indices]) * mask, y[indices]).backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1)
            optimizer.step()
    trained = {}
    for name, parameter in module.named_parameters():
        trained[name] = parameter.detach().numpy()
    return trained


def overhead(root: Path, data: Path) -> list[Row]:
    """Return the share of later rounds in which the only worker does not train, and its start."""
    result = simulate(settings(root, data, "alone", engine={"workers": 1}))
    trained = dict.fromkeys(range(1, TIMED + 1), 0.0)
    for row in read_devices(result.folder):
        if row.round in trained:
            trained[row.round] += row.seconds
    started = 0.0
    later = 0.0
    outside = 0.0
    for row in result.rounds:
        if row.round not in trained:
            continue
        besides = row.seconds - trained[row.round]
        # The first round has what a simulation does once.
        if row.round == 1:
            started = besides
        else:
            later += row.seconds
            outside += besides
    return [
        Row(
            "simulation overhead outside training",
            outside / later,
            "share",
            0.05,
            note=f"{outside:.2f} of {later:.1f} s",
        ),
        Row("simulation start: first round outside training", started, "s"),
    ]


def memory(root: Path, data: Path) -> list[Row]:
    """Resident memory of a simulation of many devices, and how it grows with rounds."""
    seen: list[float] = []
    config = settings(
        root,
        data,
        "many",
        data={"train_limit": None, "test_limit": 500},
        model={"widths": (1.0, 0.0625)},
        devices={"count": MEMORY_DEVICES},
        round={"rounds": MEMORY_ROUNDS, "fraction": 1.0},
        train={"steps": 2},
        tiers={"assign": "capacity", "levels": None, "allowed": ("w0.0625-d1",)},
        evaluation={"tier": "w0.0625-d1"},
    )
    me = psutil.Process()
    simulate(config, watch=lambda _row: seen.append(resident(me)))
    growth = max(seen[1:]) / seen[1] - 1
    return [
        Row(
            f"simulation memory: {MEMORY_DEVICES} devices, conv width 1/16, all processes",
            max(seen) / GB,
            "GB",
            MEMORY_BUDGET_GB,
        ),
        Row(
            f"simulation memory growth, rounds 2 to {MEMORY_ROUNDS}",
            growth,
            "share",
            0.05,
            note=f"{(max(seen[1:]) - seen[1]) / MB:.0f} MB",
        ),
    ]


def resident(process: psutil.Process) -> float:
    """Bytes of a process and its children."""
    count = process.memory_info().rss
    for child in process.children(recursive=True):
        count += child.memory_info().rss
    return float(count)
