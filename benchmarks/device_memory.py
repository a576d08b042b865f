"""Resident memory of a whole device process while it trains, beside a PyTorch process doing the same; installed size.

python -m benchmarks.device_memory

The device is the real agent, ``python -m device_runtime``, against a real broker: it fetches ``conv`` at width 1,
trains it at batch 32, evaluates, uploads, and reports the peak of its own resident memory (VmHWM). It runs in this
environment and, where pip can make one, in a fresh environment with the ``device`` extra and stock onnxruntime.

Resident memory counts pages of libraries, too, and how many of them are mapped depends on what the kernel has in its
cache: right after an installation that is whole libraries, and 11 MB more for the same work (70 to 80 with PyTorch). So
each process is started as after a boot, when nothing of its libraries is cached.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from packaging.requirements import Requirement

from broker_server.service.broker import EmbeddedBroker
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.blobs import blob_ref, iter_chunks
from fleet_protocol.link import Link
from fleet_protocol.manifest import parse_manifest
from fleet_protocol.messages import Done, NeedChunks, Offer, Refuse, TierChoice, TrainSettings, parse_device_message
from fleet_protocol.topics import Topics
from fleet_protocol.transport import BrokerAddress, Received

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["rows"]

MEMORY_BUDGET_MB = 140.0
RATIO_BUDGET = 0.45
BATCH, SAMPLES, EPOCHS = 32, 320, 3
PATIENCE_SECONDS = 180.0
MB = 1024 * 1024
REPOSITORY = Path(__file__).resolve().parents[1]
TOPICS = Topics("bench")
DEVICE = "board"

Row = dict[str, Any]

_EXPORT = """
import sys
from pathlib import Path
from models.registry import Registry
from models.tier import Tier
from trainer_export.artifact_set import export_architecture
from trainer_export.recipe import Recipe
export_architecture(Registry.zoo().get("conv"), {}, [Tier(1.0, 1)], Recipe(), Path(sys.argv[1]), formats=("onnx",))
"""

# The same samples, model and recipe as one would write them in PyTorch, one thread as the device has.
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


def _as_after_boot(python: Path) -> None:
    """Let the kernel forget the libraries of an environment."""
    for path in (python.parent.parent / "lib").rglob("*.so*"):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # pages that are not written yet cannot be forgotten
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _python(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False, cwd=REPOSITORY
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return done.stdout.strip()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _device(python: Path, folder: Path, url: str, data: Path) -> Iterator[Path]:
    """A running device; yields its log."""
    folder.mkdir()
    lines = {"fleet": TOPICS.fleet, "device": DEVICE, "broker": url, "state_dir": "state", "backend": "onnx"}
    text = "\n".join(f"{key} = {json.dumps(value)}" for key, value in lines.items())
    config, log = folder / "device.toml", folder / "log"
    config.write_text(f'{text}\n[data]\nkind = "npz"\npath = {json.dumps(str(data))}\n')
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(python), "-m", "device_runtime", "--config", str(config)],
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


def _serve(url: str, blobs: BlobStore, choice: TierChoice, name: str) -> Done | None:
    """Be the server of one task: offer it, serve what is asked for, return its Done, if it comes to one."""
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    link = Link(BrokerAddress.parse(url), f"bench-server-{name}", inbox)
    link.connect(20)
    try:
        link.subscribe(TOPICS.all_status)
        link.subscribe(TOPICS.all_replies)
        deadline = time.monotonic() + PATIENCE_SECONDS
        offered = False
        while True:
            event = inbox.get(timeout=max(0.1, deadline - time.monotonic()))
            if not isinstance(event, Received):
                continue
            if event.topic == TOPICS.status(DEVICE):
                if not offered and b'"online":true' in event.payload and not event.retained:
                    offered = True
                    link.publish(TOPICS.task(DEVICE), _offer(choice, name).to_bytes())
                continue
            message = parse_device_message(event.payload)
            if isinstance(message, Done | Refuse):
                return message if isinstance(message, Done) else None
            if isinstance(message, NeedChunks):
                chunk_bytes = choice.weights.chunk_bytes
                for index, frame in iter_chunks(blobs.read(message.digest), chunk_bytes, message.ranges):
                    link.publish(TOPICS.blob(message.digest, index), frame)
    finally:
        link.close()


def _offer(choice: TierChoice, name: str) -> Offer:
    return Offer(
        fleet=TOPICS.fleet,
        run="bench",
        round=1,
        task=name,
        version=0,
        choices=(choice,),
        train=TrainSettings(learning_rate=0.01, epochs=EPOCHS, batch_size=BATCH, seed=0),
        seconds_left=PATIENCE_SECONDS,
    )


def _device_megabytes(python: Path, work: Path, name: str) -> tuple[float, float]:
    """Peak resident memory of a device in MB, and seconds per step."""
    blobs = BlobStore(work / "artifacts")
    arch = work / "artifacts" / "conv"
    manifest = (arch / "w1.00-d1" / "manifest.json").read_bytes()
    weights = (arch / "init.safetensors").read_bytes()
    for data in (manifest, weights):
        blobs.put(data)
    choice = TierChoice(tier=parse_manifest(manifest).tier, artifact_set=blob_ref(manifest), weights=blob_ref(weights))
    with (
        EmbeddedBroker(work / f"broker-{name}", port=_free_port()) as broker,
        _device(python, work / name, broker.url, work / "data.npz") as log,
    ):
        try:
            done = _serve(broker.url, blobs, choice, name)
        except queue.Empty:
            done = None
        if done is None:
            raise RuntimeError(f"no update came; the device said:\n{log.read_text()[-2000:]}")
    return done.metrics.resident_bytes / MB, done.metrics.train_seconds / done.metrics.batches


def _requirements() -> list[str]:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *project["optional-dependencies"]["device"]]
    return [text for text in texts if (mark := Requirement(text).marker) is None or mark.evaluate()]


def _fresh_environment(folder: Path) -> Path:
    """An environment with the ``device`` extra.

    Raises:
        RuntimeError: pip cannot run here.
    """
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    constraints = REPOSITORY / "constraints.txt"
    pinned = ["--constraint", str(constraints)] if constraints.is_file() else []
    command = [str(python), "-m", "pip", "install", "--quiet", *pinned, *_requirements()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["pip failed"])[-1][:160])
    return python


def _installed_megabytes(python: Path) -> float:
    """Bytes of the packages, pip and setuptools left out, plus our own two packages of Python files."""
    site = next(python.parent.parent.glob("lib/python*/site-packages"))
    skipped = {"pip", "setuptools", "pkg_resources", "_distutils_hack", "__pycache__"}
    folders = [p for p in site.iterdir() if p.name.split("-")[0] not in skipped]
    folders += [REPOSITORY / "device_runtime", REPOSITORY / "fleet_protocol"]
    files = (f for folder in folders for f in ([folder] if folder.is_file() else folder.rglob("*")))
    return sum(f.stat().st_size for f in files if f.is_file() and f.suffix != ".pyc") / MB


def _row(name: str, value: float | None, unit: str, budget: float | None = None) -> Row:
    ok = budget is None or (value is not None and value <= budget)
    return {"name": f"device_memory.{name}", "value": value, "unit": unit, "budget": budget, "ok": ok}


def rows() -> list[Row]:
    """Measure.

    Returns:
        One row per figure: ``name``, ``value``, ``unit``, ``budget`` and ``ok``; a row that cannot be measured here has
        no value, no budget, and the reason as its unit.
    """
    if importlib.util.find_spec("iotcore") is None:
        return [_row("resident", None, "skipped: the extra `broker` is not installed")]
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as name:
        work = Path(name)
        draw = np.random.default_rng(0)
        x = draw.normal(size=(SAMPLES, 1, 28, 28)).astype(np.float32)
        np.savez(work / "data.npz", x=x, y=draw.integers(0, 10, SAMPLES))
        _python(_EXPORT, str(work / "artifacts"))
        _as_after_boot(Path(sys.executable))
        torch = int(_python(_TORCH, str(work / "data.npz"))) / 1024
        _as_after_boot(Path(sys.executable))
        here, step = _device_megabytes(Path(sys.executable), work, "here")
        result = [
            _row("resident", here, "MB, this environment's onnxruntime", MEMORY_BUDGET_MB),
            _row("resident_to_pytorch", here / torch, "ratio", RATIO_BUDGET),
            _row("resident_pytorch", torch, "MB"),
            _row("step", step * 1000, "ms, 1 thread"),
        ]
        try:
            python = _fresh_environment(work / "venv")
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            return [*result, _row("installed", None, f"skipped: no fresh environment: {error}")]
        _as_after_boot(python)
        stock, step = _device_megabytes(python, work, "stock")
        return [
            *result,
            _row("resident_stock", stock, "MB, fresh `device` extra", MEMORY_BUDGET_MB),
            _row("resident_stock_to_pytorch", stock / torch, "ratio", RATIO_BUDGET),
            _row("step_stock", step * 1000, "ms, 1 thread"),
            _row("installed", _installed_megabytes(python), "MB, `device` extra"),
        ]


if __name__ == "__main__":
    for row in rows():
        print(json.dumps(row))
