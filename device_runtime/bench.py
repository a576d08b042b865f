"""Measures the cost of training on this board; works on any board, without a network.

It needs no PyTorch. Each artifact set trains with the code of a task, in its own process, so that
memory and first step belong to that set only: ``python -m device_runtime.bench MANIFEST BATCH
BEGAN``.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from device_runtime.board import (
    machine_name,
    peak_resident_bytes,
    probe,
    runtime_version,
)
from device_runtime.training.backends import (
    Sessions,
    choose_backend,
    load_runtime,
    step_graph_key,
)
from device_runtime.training.epochs import made_up_steps
from fleet_protocol.allocator import settle_allocator
from fleet_protocol.child_process import python_module
from fleet_protocol.errors import ConfigError
from fleet_protocol.foreign_files import path_within, read_within
from fleet_protocol.manifest import BASE, Manifest, parse_manifest
from fleet_protocol.mapped_tensors import open_tensors
from fleet_protocol.memory_plans import PLAN_FILES

SMALL = Path(__file__).parent / "self_test_set"
"""An artifact set that is installed on every board."""

_WHOLE = "manifest.json"
_SECONDS = 1200.0
_STEPS = 5
_MOST_STEPS = 500
_MEASURED_SECONDS = 2.0  # after which no further step begins once there are enough


@dataclass(frozen=True)
class Cost:
    """The cost of an artifact set on this board, with one thread.

    Attributes:
        arch: architecture of the model.
        tier: tier of the sub-model, with the name of the plan if it is one with less memory.
        batch: samples of a step; they are synthetic.
        step_ms: processor time of a step, the median; its quartiles follow.
        step_low_ms: the lower quartile.
        step_high_ms: the upper quartile.
        wall_ms: median wall-clock time of a step.
        opens_ms: processor time to check and open the step graph.
        opens_again_ms: the same for a graph that this process has opened before.
        first_step_seconds: wall-clock time from the start of the process to the end of its first
            step.
        peak_mb: peak resident memory of the process.
        loss: at the fifth step; all boards use the same samples, so boards that compute alike agree
            on it.
    """

    arch: str
    tier: str
    batch: int
    step_ms: float
    step_low_ms: float
    step_high_ms: float
    wall_ms: float
    opens_ms: float
    opens_again_ms: float
    first_step_seconds: float
    peak_mb: float
    loss: float


def board_line() -> str:
    """Return the properties that distinguish boards, in one line."""
    board = probe()
    backend = choose_backend("auto")
    memory = f"{board.ram_bytes / 2**30:.1f} GiB"
    runtime = board.backends[backend]
    machine = f"{machine_name()}, {board.cores} cores, {memory}, {board.arch}, {board.system}"
    return f"{machine}, Python {board.python}, {runtime}, Shoal {runtime_version()}"


def costs(folder: Path, batch: int) -> Iterator[Cost]:
    """Measure every artifact set below a folder.

    Raises:
        ConfigError: the folder has none, no runtime is installed, or a set cannot be trained.
    """
    choose_backend("auto")
    manifests = sorted([*folder.rglob(_WHOLE), *folder.rglob(PLAN_FILES)])
    if not manifests:
        raise ConfigError(
            f"{folder} contains no artifact set: `shoal export` writes them, on a machine with"
            " PyTorch"
        )
    for path in manifests:
        yield _measure_in_process(path, batch)


def _measure_in_process(path: Path, batch: int) -> Cost:
    """Measure the artifact set of a manifest in its own process."""
    began = str(time.monotonic())
    command = python_module("device_runtime.bench", str(path), str(batch), began)
    try:
        done = subprocess.run(  # noqa: S603
            command,
            capture_output=True,
            text=True,
            check=True,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{path}: not trained within {_SECONDS:.0f} s: use a smaller --batch"
        ) from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"ended with {error.returncode}"]
        raise ConfigError(f"{path}: cannot be trained here: {lines[-1]}") from None
    return Cost(**json.loads(done.stdout))


# The functions below run in that process.


@dataclass(frozen=True)
class _Steps:
    """Measured steps.

    Attributes:
        processor_ms: milliseconds of each.
        wall_ms: milliseconds of each.
        losses: losses of each.
    """

    processor_ms: list[float]
    wall_ms: list[float]
    losses: list[float]


def _measure(path: Path, batch: int, began: float) -> Cost:
    """Measure an artifact set; `began` is ``time.monotonic()`` at the start of its process."""
    settle_allocator()
    # Otherwise its import would count as part of opening the graph.
    load_runtime()  # each process does this once, whatever it opens
    manifest = parse_manifest(read_within(path.parent, path.name))
    key = step_graph_key(choose_backend("auto"), manifest)
    if key is None:
        raise ConfigError("it has no step for this runtime")
    graph = path_within(path.parent, manifest.graphs[key].path)
    base = _base(path.parent, manifest)
    start = time.process_time()
    steps = made_up_steps(Sessions(threads=1).train(manifest, graph, base), manifest, batch)
    opens_seconds = time.process_time() - start
    first_loss = next(steps)
    first_step_seconds = time.monotonic() - began
    measured = _measure_steps(steps)
    peak_mb = peak_resident_bytes() / 1e6
    del steps  # with its session, so that only the next one is in memory
    start = time.process_time()
    Sessions(threads=1).train(manifest, graph, base)
    opens_again_seconds = time.process_time() - start
    low, middle, high = statistics.quantiles(measured.processor_ms, n=4)
    return Cost(
        arch=manifest.arch,
        tier=manifest.tier if path.name == _WHOLE else f"{manifest.tier} {path.stem}",
        batch=batch,
        step_ms=middle,
        step_low_ms=low,
        step_high_ms=high,
        wall_ms=statistics.median(measured.wall_ms),
        opens_ms=1e3 * opens_seconds,
        opens_again_ms=1e3 * opens_again_seconds,
        first_step_seconds=first_step_seconds,
        peak_mb=peak_mb,
        loss=[first_loss, *measured.losses][4],
    )


def _base(folder: Path, manifest: Manifest) -> dict[str, NDArray[Any]]:
    if BASE not in manifest.files:
        return {}
    return open_tensors(path_within(folder, manifest.files[BASE].path))


def _measure_steps(steps: Iterator[float]) -> _Steps:
    measured = _Steps([], [], [])
    end = time.monotonic() + _MEASURED_SECONDS
    while len(measured.losses) < _STEPS or (
        time.monotonic() < end and len(measured.losses) < _MOST_STEPS
    ):
        clock = time.perf_counter()
        processor = time.process_time()
        measured.losses.append(next(steps))
        measured.processor_ms.append(1e3 * (time.process_time() - processor))
        measured.wall_ms.append(1e3 * (time.perf_counter() - clock))
    return measured


if __name__ == "__main__":
    cost = _measure(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
    print(json.dumps(asdict(cost)))
