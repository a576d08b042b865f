"""Resident memory of a whole device process while it trains, beside a PyTorch process doing the same; installed size.

The device is the real agent, ``python -m device_runtime``, against a real broker: it fetches ``conv`` at width 1,
trains it at batch 32, evaluates, uploads, and reports the peak of its own resident memory (VmHWM). It runs in this
environment and, where pip can make one, in a fresh environment with the ``device`` extra and stock onnxruntime.

Resident memory counts pages of libraries, too, and how many of them are mapped depends on what the kernel has in its
cache: right after an installation that is whole libraries, and 11 MB more for the same work (70 to 80 with PyTorch). So
each process is started as after a boot, when nothing of its libraries is cached.
"""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from packaging.requirements import Requirement

from benchmarks.child import REPOSITORY, printed
from benchmarks.row import Row
from broker_server.service.broker import EmbeddedBroker
from broker_server.service.server import Server
from broker_server.settings.fleet import FleetConfig
from fleet_protocol.control import RunEvent, UpdateReceived
from models.registry import Registry
from models.tier import Tier
from tests.brokers import free_port
from trainer_export.artifact_set import export_architecture
from trainer_export.recipe import Recipe

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MEMORY_BUDGET_MB = 140.0
RATIO_BUDGET = 0.45
BATCH, SAMPLES, EPOCHS = 32, 320, 3
PATIENCE_SECONDS = 180.0
MB = 1024 * 1024
FLEET, DEVICE = "bench", "board"

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


@contextlib.contextmanager
def _device(python: Path, folder: Path, url: str, data: Path) -> Iterator[Path]:
    """A running device; yields its log."""
    folder.mkdir()
    lines = {"fleet": FLEET, "device": DEVICE, "broker": url, "state_dir": "state", "backend": "onnx"}
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


def _device_megabytes(python: Path, work: Path, name: str) -> tuple[float, float]:
    """Peak resident memory of a device in MB, and seconds per step."""
    events: list[RunEvent] = []
    with EmbeddedBroker(work / f"broker-{name}", port=free_port()) as broker:
        config = FleetConfig.model_validate(
            {
                "fleet": FLEET,
                "store": work / f"store-{name}",
                "broker": {"url": broker.url},
                "model": {"artifacts": work / "artifacts", "arch": "conv"},
                "round": {"rounds": 1, "deadline_seconds": PATIENCE_SECONDS, "wait_seconds": PATIENCE_SECONDS},
                "train": {"learning_rate": 0.01, "epochs": EPOCHS, "batch_size": BATCH},
            }
        )
        with (
            Server(FLEET, config.store, config.broker, listener=events.append) as server,
            _device(python, work / name, broker.url, work / "data.npz") as log,
        ):
            server.run(config)
            found = [event.metrics for event in events if isinstance(event, UpdateReceived) and event.kind == "train"]
            if not found:
                raise RuntimeError(f"no update came; the device said:\n{log.read_text()[-2000:]}")
    return found[0].resident_bytes / MB, found[0].train_seconds / found[0].batches


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


def rows() -> list[Row]:
    """Measure."""
    if importlib.util.find_spec("iotcore") is None:
        return [Row("device_memory.resident", None, "skipped: the extra `broker` is not installed")]
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as name:
        work = Path(name)
        draw = np.random.default_rng(0)
        x = draw.normal(size=(SAMPLES, 1, 28, 28)).astype(np.float32)
        np.savez(work / "data.npz", x=x, y=draw.integers(0, 10, SAMPLES))
        export_architecture(
            Registry.zoo().get("conv"), {}, [Tier(1.0)], Recipe(), work / "artifacts", formats=("onnx",)
        )
        _as_after_boot(Path(sys.executable))
        torch = int(printed("-c", _TORCH, str(work / "data.npz"))) / 1024
        _as_after_boot(Path(sys.executable))
        here, step = _device_megabytes(Path(sys.executable), work, "here")
        result = [
            Row("device_memory.resident", here, "MB, this environment's onnxruntime", MEMORY_BUDGET_MB),
            Row("device_memory.resident_to_pytorch", here / torch, "ratio", RATIO_BUDGET),
            Row("device_memory.resident_pytorch", torch, "MB"),
            Row("device_memory.step", step * 1000, "ms, 1 thread"),
        ]
        try:
            python = _fresh_environment(work / "venv")
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            return [*result, Row("device_memory.installed", None, f"skipped: no fresh environment: {error}")]
        _as_after_boot(python)
        stock, step = _device_megabytes(python, work, "stock")
        return [
            *result,
            Row("device_memory.resident_stock", stock, "MB, fresh `device` extra", MEMORY_BUDGET_MB),
            Row("device_memory.resident_stock_to_pytorch", stock / torch, "ratio", RATIO_BUDGET),
            Row("device_memory.step_stock", step * 1000, "ms, 1 thread"),
            Row("device_memory.installed", _installed_megabytes(python), "MB, `device` extra"),
        ]
