"""Resident memory of a board that trains adapters of a large frozen model, whose base is mapped from one file.

    python -m benchmarks.base_memory            a decoder with the dimensions of SmolLM-135M, random weights

The export runs here, the training as `shoal device bench` does it, without torch, so that its peak is a board's. The
base has 513 MB; a copy of it, by the runtime or by us, would show as that much more.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from device_runtime.bench import costs
from fleet_protocol.manifest import BASE, parse_manifest
from models.registry import Registry, infer_layout
from trainer_export.artifact_set import export_architecture
from trainer_export.recipe import Recipe

LIMIT_MB = 1200.0
SETTINGS: Mapping[str, Any] = {"input_shape": (64,), "rank": 4}


def measured(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Export the whole tier, train it in a process of its own, and add what lies on disk."""
    architecture = Registry.zoo().get("smollm")
    tier = infer_layout(architecture, settings).tier(1.0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        export_architecture(architecture, settings, [tier], Recipe(), folder, formats=("onnx",))
        (path,), (cost,) = folder.rglob("manifest.json"), costs(folder, 1)
        manifest = parse_manifest(path.read_bytes())
        files = {item.stat().st_ino: item.stat().st_size for item in folder.rglob("*") if item.is_file()}
    return {
        "peak_mb": cost.peak_mb,
        "base_mb": manifest.files[BASE].size / 1e6,
        "disk_mb": sum(files.values()) / 1e6,
        "trained": manifest.parameter_count,
        "loss": cost.loss,
    }


if __name__ == "__main__":
    figures = measured(SETTINGS)
    print(json.dumps(figures, indent=1))
    sys.exit(figures["peak_mb"] > LIMIT_MB)
