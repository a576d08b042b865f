"""Resident memory of a device process while it trains each net, beside a PyTorch process.

The device is the real agent, ``python -m device_runtime``, against a real broker: it fetches a net
of `benchmarks.step_time`, trains it with one thread, and reports the peak of its resident memory
(VmHWM) with its update. It does so by the tier's own step, and by the plan that needs the least
memory. A process that waits for its first task shows what the runtime and its libraries need.

Resident memory counts pages of libraries, too, and how many of them are mapped depends on what the
kernel has in its cache. Right after an installation, whole libraries are mapped, which adds 11 MB
for the same work (70 to 80 with PyTorch). So each process starts as after a boot, with none of its
libraries cached.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.child import REPOSITORY
from benchmarks.row import Row
from benchmarks.step_time import CASES, Case
from benchmarks.torch_peak import torch_peak
from benchmarks.unchecked_set import UncheckedSet
from broker_server.service.embedded_broker import EmbeddedBroker
from broker_server.service.server import Server
from broker_server.settings.fleet import FleetConfig
from device_runtime.board import proc_number
from fleet_protocol.control import RoundStarted, RunEvent, UpdateReceived
from fleet_protocol.errors import ShoalError
from fleet_protocol.manifest import Manifest
from tests.brokers import free_port
from trainer_export.check import calm_torch

RATIO_BUDGET = 0.25
BATCHES = 4
EPOCHS = 2
PATIENCE_SECONDS = 400.0
MB = 1e6
FLEET = "bench"
DEVICE = "board"


def measured_cases() -> tuple[Case, ...]:
    """Return the nets: each of the zoo and of `benchmarks.nets` at its full width."""
    return tuple(case for case in CASES if case.width == 1.0)


def _as_after_boot() -> None:
    """Let the kernel forget the libraries of this environment."""
    for path in (Path(sys.prefix) / "lib").rglob("*.so*"):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # pages that are not written yet cannot be forgotten
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def _device(
    folder: Path,
    url: str,
    data: Path,
) -> Iterator[tuple[int, Path]]:
    """A running device; yields its process id and its log."""
    folder.mkdir()
    lines = {
        "fleet": FLEET,
        "device": DEVICE,
        "broker": url,
        "state_dir": "state",
        "backend": "onnx",
        "threads": 1,
    }
    text = "\n".join(f"{key} = {json.dumps(value)}" for key, value in lines.items())
    config = folder / "device.toml"
    log = folder / "log"
    config.write_text(f'{text}\n[data]\nkind = "npz"\npath = {json.dumps(str(data))}\n')
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "device_runtime", "--config", str(config)],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            cwd=folder,
            stdout=output,
            stderr=output,
        )
    try:
        yield process.pid, log
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


@dataclass(frozen=True)
class _Training:
    """Memory and start time of a device that trained for one round.

    Attributes:
        peak_mb: peak resident memory.
        waiting_mb: the same before the first offer.
        start_seconds: time from the start of the process to its first offer.
    """

    peak_mb: float
    waiting_mb: float
    start_seconds: float


def _train(
    case: Case,
    artifacts: Path,
    samples: Path,
    work: Path,
) -> _Training:
    """Let a device train a net for a round.

    Args:
        case: the net.
        artifacts: folder of its set.
        samples: file of samples.
        work: an empty folder for the fleet.

    Raises:
        RuntimeError: the device sent no update.
    """
    events: list[RunEvent] = []
    ready: list[float] = []
    waiting: list[int] = []
    process_ids: list[int] = []

    def count_event(event: RunEvent) -> None:
        events.append(event)
        if isinstance(event, RoundStarted):
            ready.append(time.monotonic())
            waiting.append(proc_number(Path(f"/proc/{process_ids[0]}/status"), "VmHWM"))

    with EmbeddedBroker(work / "broker", port=free_port()) as broker:
        config = FleetConfig.model_validate(
            {
                "fleet": FLEET,
                "store": work / "store",
                "broker": {"url": broker.url},
                "model": {"artifacts": artifacts, "arch": case.arch},
                "round": {
                    "rounds": 1,
                    "deadline_seconds": PATIENCE_SECONDS,
                    "wait_seconds": PATIENCE_SECONDS,
                },
                "train": {"learning_rate": 0.01, "epochs": EPOCHS, "batch_size": case.batch},
            }
        )
        with (
            Server(FLEET, config.store, config.broker, listener=count_event) as server,
            _device(work / DEVICE, broker.url, samples) as (process_id, log),
        ):
            process_ids.append(process_id)
            began = time.monotonic()
            server.run(config)
            metrics = []
            for event in events:
                if isinstance(event, UpdateReceived) and event.kind == "train":
                    metrics.append(event.metrics)
            if not metrics:
                raise RuntimeError(
                    f"the device sent no update; its log ends with:\n{log.read_text()[-2000:]}"
                )
    return _Training(
        peak_mb=metrics[0].resident_bytes / MB,
        waiting_mb=waiting[0] / MB,
        start_seconds=ready[0] - began,
    )


def rows() -> list[Row]:
    """Measure every net, and what a process needs before it has one."""
    table: list[Row] = []
    with calm_torch():
        for case in measured_cases():
            table += measured(case)
    return table


def measured(case: Case) -> list[Row]:
    """Return the rows of a net, or one that says why it cannot be measured here."""
    try:
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as name:
            return _measured(case, Path(name))
    except (ModuleNotFoundError, RuntimeError, ShoalError) as error:
        reason = f"skipped: {str(error).strip().splitlines()[-1]}"
        return [Row(f"memory of a device, {case.name}", None, reason)]


def _measured(case: Case, work: Path) -> list[Row]:
    """Return the rows of one net: by its own step, and by the smallest plan's."""
    whole = UncheckedSet.of(case)
    smallest = whole.with_smallest_step()
    samples = work / "samples.npz"
    whole.write_samples(samples, BATCHES)
    manifest = whole.publish(work / "whole")
    plan = smallest.publish(work / "plan")
    path = work / "whole" / case.arch / manifest.tier / "manifest.json"
    _as_after_boot()
    torch_mb = torch_peak(path, case.batch, samples)
    trained = {}
    for name in ("whole", "plan"):
        _as_after_boot()
        folder = work / f"fleet-{name}"
        folder.mkdir()
        trained[name] = _train(case, work / name, samples, folder)
    own = trained["whole"]
    least = trained["plan"]
    figures = {
        "memory of a device": own.peak_mb,
        "memory of a device with the smallest plan": least.peak_mb,
        "memory of PyTorch": torch_mb,
        "memory of a waiting device": own.waiting_mb,
        "memory of weights, momentum and gradients": 4 * _state_numbers(manifest) / MB,
        "estimate for batches of 32": manifest.peak_memory_bytes / MB,
        "estimate for batches of 32 with the smallest plan": plan.peak_memory_bytes / MB,
    }
    table = [
        _ratio_row("device", case, own.peak_mb, torch_mb),
        _ratio_row("device with the smallest plan", case, least.peak_mb, torch_mb),
    ]
    for figure, value in figures.items():
        table.append(Row(f"{figure}, {case.name}", value, "MB"))
    start = own.start_seconds
    table.append(Row(f"cold start, process to first offer, {case.name}", start, "s, clock"))
    return table


def _ratio_row(
    name: str,
    case: Case,
    device_mb: float,
    torch_mb: float,
) -> Row:
    return Row(
        f"memory {name}/PyTorch, {case.name}",
        device_mb / torch_mb,
        "ratio, process",
        RATIO_BUDGET,
        note=f"{device_mb:.0f} / {torch_mb:.0f} MB",
    )


def _state_numbers(manifest: Manifest) -> int:
    """Return the count of weights, gradients and optimizer states, each of which a step holds."""
    weights = sum(math.prod(spec.shape) for spec in manifest.parameters)
    states = sum(math.prod(spec.shape) for spec in manifest.states)
    return weights + manifest.trained_count + states
