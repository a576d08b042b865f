"""Resident memory of a device process while it trains, beside a PyTorch process, and its start.

The device is the real agent, ``python -m device_runtime``, against a real broker: it fetches
``conv`` at width 1, trains it at batch 32, evaluates, uploads, and reports the peak of its own
resident memory (VmHWM).

Resident memory counts pages of libraries, too, and how many of them are mapped depends on what the
kernel has in its cache. Right after an installation, whole libraries are mapped, which adds 11 MB
for the same work (70 to 80 with PyTorch). So each process starts as after a boot, with none of its
libraries cached.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.child import REPOSITORY, printed
from benchmarks.row import Row
from broker_server.service.embedded_broker import EmbeddedBroker
from broker_server.service.server import Server
from broker_server.settings.fleet import FleetConfig
from fleet_protocol.control import RoundStarted, RunEvent, UpdateReceived
from models.registry import Registry
from models.tier import Tier
from tests.brokers import free_port
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.recipe import Recipe

MEMORY_BUDGET_MB = 110.0
RATIO_BUDGET = 0.3
BATCH = 32
SAMPLES = 320
EPOCHS = 3
PATIENCE_SECONDS = 180.0
MB = 1024 * 1024
FLEET = "bench"
DEVICE = "board"

# The same samples, model and recipe as one would write them in PyTorch, one thread as the device
# has.
_TORCH = f"""
import sys
import numpy as np
import torch
from models.architecture import build
from models.registry import Registry
torch.set_num_threads(1)
with np.load(sys.argv[1]) as file:
    x, y = torch.from_numpy(file["x"]), torch.from_numpy(file["y"])
model = build(Registry.zoo().get("conv"), 1.0)
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=5e-4)
for epoch in range({EPOCHS}):
    for indices in torch.randperm(len(x)).split({BATCH}):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[indices]), y[indices]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
with open("/proc/self/status") as file:
    print(next(line.split()[1] for line in file if line.startswith("VmHWM")))
"""


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
) -> Iterator[Path]:
    """A running device; yields its log."""
    folder.mkdir()
    lines = {
        "fleet": FLEET,
        "device": DEVICE,
        "broker": url,
        "state_dir": "state",
        "backend": "onnx",
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
        yield log
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def _device_figures(work: Path) -> tuple[float, float, float]:
    """Return a device's peak memory in MB, seconds a step, and seconds until its first offer."""
    events: list[RunEvent] = []
    ready: list[float] = []

    def count_event(event: RunEvent) -> None:
        events.append(event)
        if isinstance(event, RoundStarted):
            ready.append(time.monotonic())

    with EmbeddedBroker(work / "broker", port=free_port()) as broker:
        config = FleetConfig.model_validate(
            {
                "fleet": FLEET,
                "store": work / "store",
                "broker": {"url": broker.url},
                "model": {"artifacts": work / "artifacts", "arch": "conv"},
                "round": {
                    "rounds": 1,
                    "deadline_seconds": PATIENCE_SECONDS,
                    "wait_seconds": PATIENCE_SECONDS,
                },
                "train": {"learning_rate": 0.01, "epochs": EPOCHS, "batch_size": BATCH},
            }
        )
        with (
            Server(FLEET, config.store, config.broker, listener=count_event) as server,
            _device(work / DEVICE, broker.url, work / "data.npz") as log,
        ):
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
    trained = metrics[0]
    step_seconds = trained.train_seconds / trained.batches
    start_seconds = ready[0] - began
    return trained.resident_bytes / MB, step_seconds, start_seconds


def rows() -> list[Row]:
    """Measure."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as name:
        work = Path(name)
        draw = np.random.default_rng(0)
        x = draw.normal(size=(SAMPLES, 1, 28, 28)).astype(np.float32)
        np.savez(work / "data.npz", x=x, y=draw.integers(0, 10, SAMPLES))
        export_architecture(
            ExportRequest(Registry.zoo().get("conv"), {}, [Tier(1.0)], Recipe()),
            work / "artifacts",
            ExportOptions(formats=("onnx",)),
        )
        _as_after_boot()
        torch = int(printed("-c", _TORCH, str(work / "data.npz"))) / 1024
        _as_after_boot()
        here, step, start = _device_figures(work)
        return [
            Row(
                "device_memory.resident",
                here,
                "MB, this environment's onnxruntime",
                MEMORY_BUDGET_MB,
            ),
            Row("device_memory.resident_to_pytorch", here / torch, "ratio", RATIO_BUDGET),
            Row("device_memory.resident_pytorch", torch, "MB"),
            Row("device_memory.step", step * 1000, "ms, 1 thread"),
            Row(
                "device cold start, nothing of its libraries cached: process to first offer",
                start,
                "s, clock",
            ),
        ]
