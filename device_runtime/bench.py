"""What training costs on this board: one table for every board, made without a network and without
PyTorch.

Each artifact set trains by the way of a task, in a process of its own, whose memory and first step
are then of that set alone: ``python -m device_runtime.bench MANIFEST BATCH BEGAN``.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

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
from fleet_protocol.manifest import BASE, parse_manifest
from fleet_protocol.mapped_tensors import open_tensors

SMALL = Path(__file__).parent / "self_test_set"
"""A set that every board has."""

_SECONDS = 1200.0
_STEPS = 5
_MOST_STEPS = 500


@dataclass(frozen=True)
class Cost:
    """What an artifact set takes on this board, with one thread."""

    arch: str
    tier: str
    batch: int
    step_ms: (
        float  # processor time of a step with its made-up samples, the median; its quartiles follow
    )
    step_low_ms: float
    step_high_ms: float
    wall_ms: float  # the median by the clock
    opens_ms: float  # processor time to look at the step graph and open it
    opens_again_ms: float  # the same of a graph that this process knows
    first_step_seconds: (
        float  # by the clock, from the start of the process to the end of its first step
    )
    peak_mb: float  # of the process's resident memory
    # at the fifth step; the samples are the same everywhere, so boards that compute alike agree on
    # it
    loss: float


def board_line() -> str:
    """What boards are told apart by, in a line."""
    board = probe()
    backend = choose_backend("auto")
    memory = f"{board.ram_bytes / 2**30:.1f} GiB"
    runtime = board.backends[backend]
    machine = f"{machine_name()}, {board.cores} cores, {memory}, {board.arch}, {board.system}"
    return f"{machine}, Python {board.python}, {runtime}, Shoal {runtime_version()}"


def costs(folder: Path, batch: int) -> Iterator[Cost]:
    """Measure every artifact set below a folder.

    Raises:
        ConfigError: there is none, no runtime is installed, or a set cannot be trained.
    """
    choose_backend("auto")
    found = sorted(folder.rglob("manifest.json"))
    if not found:
        raise ConfigError(
            f"{folder} holds no artifact set: `shoal export` writes them, on a machine with PyTorch"
        )
    for path in found:
        command = python_module(
            "device_runtime.bench", str(path), str(batch), str(time.monotonic())
        )
        try:
            done = subprocess.run(  # noqa: S603
                command, capture_output=True, text=True, check=True, timeout=_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"{path}: not trained within {_SECONDS:.0f} s: take a smaller --batch"
            ) from None
        except subprocess.CalledProcessError as error:
            last = (error.stderr.strip().splitlines() or [f"ended with {error.returncode}"])[-1]
            raise ConfigError(f"{path}: cannot be trained here: {last}") from None
        yield Cost(**json.loads(done.stdout))


def _cost(path: Path, batch: int, began: float) -> Cost:
    settle_allocator()
    load_runtime()  # which each process does once, whatever it opens
    manifest = parse_manifest(read_within(path.parent, path.name))
    key = step_graph_key(choose_backend("auto"), manifest)
    if key is None:
        raise ConfigError("it has no step for this runtime")
    graph = path_within(path.parent, manifest.graphs[key].path)
    base = {}
    if BASE in manifest.files:
        base = open_tensors(path_within(path.parent, manifest.files[BASE].path))
    start = time.process_time()
    steps = made_up_steps(Sessions(threads=1).train(manifest, graph, base), manifest, batch)
    opened = time.process_time() - start
    losses = [next(steps)]
    first = time.monotonic() - began
    used = list[float]()
    passed = list[float]()
    end = time.monotonic() + 2
    while len(used) < _STEPS or (time.monotonic() < end and len(used) < _MOST_STEPS):
        clock = time.perf_counter()
        cpu = time.process_time()
        losses.append(next(steps))
        used.append(1e3 * (time.process_time() - cpu))
        passed.append(1e3 * (time.perf_counter() - clock))
    peak = peak_resident_bytes() / 1e6
    del steps
    start = time.process_time()
    Sessions(threads=1).train(manifest, graph, base)
    again = time.process_time() - start
    low, middle, high = statistics.quantiles(used, n=4)
    timed = (
        middle,
        low,
        high,
        statistics.median(passed),
        1e3 * opened,
        1e3 * again,
        first,
        peak,
    )
    return Cost(manifest.arch, str(manifest.tier), batch, *timed, losses[4])


if __name__ == "__main__":
    print(json.dumps(asdict(_cost(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))))
