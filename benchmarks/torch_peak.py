"""Peak memory of a PyTorch process that trains the model of an artifact set, without its exporter.

python -m benchmarks.torch_peak MANIFEST BATCH

Parameters that the set does not train have no gradient. Prints MB.
"""

import sys
from pathlib import Path

import torch

from benchmarks.child import printed
from benchmarks.nets import NETS
from device_runtime.board import peak_resident_bytes
from fleet_protocol.manifest import Manifest, parse_manifest
from models.architecture import build
from models.registry import Registry

_STEPS = 8


def torch_peak(manifest: Path, batch: int) -> float:
    """Return the peak resident memory in MB of a process that trains in PyTorch, with one thread.

    Args:
        manifest: manifest of the artifact set.
        batch: samples of a step.

    Raises:
        RuntimeError: the process failed.
    """
    return float(printed("-m", "benchmarks.torch_peak", str(manifest), str(batch)))


def _train(manifest: Manifest, batch: int) -> None:
    """Train with SGD and the clipping of the default recipe."""
    torch.set_num_threads(1)
    arch = NETS.get(manifest.arch) or Registry.zoo().get(manifest.arch)
    model = build(arch, manifest.width)
    trained = {spec.name for spec in manifest.trained}
    for name, value in model.named_parameters():
        value.requires_grad = name in trained
    numbers = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.SGD(numbers, 0.01, momentum=0.9, weight_decay=5e-4)
    x = torch.randn(batch, *manifest.input_shape)
    y = torch.randint(manifest.classes, (batch,))
    for _ in range(_STEPS):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(numbers, 1.0)
        optimizer.step()


if __name__ == "__main__":
    _train(parse_manifest(Path(sys.argv[1]).read_bytes()), int(sys.argv[2]))
    print(peak_resident_bytes() / 1e6)
