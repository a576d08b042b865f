"""A board's part of `benchmarks.base_memory`: train a few steps on an artifact set and print the peak of memory."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from device_runtime.board import peak_resident_bytes
from device_runtime.training.backends import Sessions, settle_allocator
from device_runtime.training.weights_file import read_weights
from fleet_protocol.manifest import BASE, parse_manifest
from fleet_protocol.mapped_tensors import open_tensors

STEPS = 3


def trained(folder: Path) -> dict[str, Any]:
    """Train the one tier below a folder on random tokens; the figures of it, in megabytes."""
    settle_allocator()
    (path,) = folder.glob("*/*/manifest.json")
    manifest = parse_manifest(path.read_bytes())
    base = open_tensors(path.parent / manifest.files[BASE].path)
    session = Sessions(threads=1).train(manifest, path.parent / manifest.graphs["onnx/train"].path, base)
    read_weights(path.parent.parent / "init.safetensors", manifest, into=session.reset())
    x = np.random.default_rng(0).integers(0, manifest.classes, (1, *manifest.input_shape))
    mask = np.ones(manifest.classes, np.float32)
    losses = [session.step(x, np.roll(x, -1, axis=1), mask, 0.5) for _ in range(STEPS)]
    return {
        "peak_mb": peak_resident_bytes() / 2**20,
        "base_mb": manifest.files[BASE].size / 2**20,
        "trained": manifest.parameter_count,
        "losses": losses,
    }


if __name__ == "__main__":
    print(json.dumps(trained(Path(sys.argv[1]))))
