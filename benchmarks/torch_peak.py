"""Peak memory of a PyTorch process that trains the model of an artifact set, without its exporter.

python -m benchmarks.torch_peak MANIFEST BATCH [SAMPLES]

Parameters that the set does not train have no gradient. SAMPLES is an npz file with x and y;
without it, images and labels are made up. Prints MB.
"""

import sys
from pathlib import Path

import numpy as np
import torch

from benchmarks.child import printed
from benchmarks.nets import NETS
from device_runtime.board import peak_resident_bytes
from fleet_protocol.manifest import Manifest, parse_manifest
from models.architecture import build
from models.registry import Registry

_STEPS = 8
_IGNORED = -1  # a label that no loss counts


def torch_peak(
    manifest: Path,
    batch: int,
    samples: Path | None = None,
) -> float:
    """Return the peak resident memory in MB of a process that trains in PyTorch, with one thread.

    Args:
        manifest: manifest of the artifact set.
        batch: samples of a step.
        samples: npz file with x and y; None for images that are made up.

    Raises:
        RuntimeError: the process failed.
    """
    arguments = [str(manifest), str(batch)]
    if samples is not None:
        arguments.append(str(samples))
    return float(printed("-m", "benchmarks.torch_peak", *arguments))


def _made_up(manifest: Manifest, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one batch of images with labels."""
    return torch.randn(batch, *manifest.input_shape), torch.randint(manifest.classes, (batch,))


def _read(samples: str) -> tuple[torch.Tensor, torch.Tensor]:
    with np.load(samples) as file:
        return torch.from_numpy(file["x"]), torch.from_numpy(file["y"])


def _loss(
    manifest: Manifest,
    logits: torch.Tensor,
    y: torch.Tensor,
) -> torch.Tensor:
    # Logits of tokens have their classes last, those of images first.
    if len(manifest.label_shape) == 1:
        logits = logits.transpose(1, 2)
    return torch.nn.functional.cross_entropy(logits, y, ignore_index=_IGNORED)


def _train(
    manifest: Manifest,
    batch: int,
    x: torch.Tensor,
    y: torch.Tensor,
) -> None:
    """Train with SGD and the clipping of the default recipe, batch by batch."""
    torch.set_num_threads(1)
    arch = NETS.get(manifest.arch) or Registry.zoo().get(manifest.arch)
    model = build(arch, manifest.width, settings=manifest.settings)
    trained = {spec.name for spec in manifest.trained}
    for name, value in model.named_parameters():
        value.requires_grad = name in trained
    numbers = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.SGD(numbers, 0.01, momentum=0.9, weight_decay=5e-4)
    first = 0
    for _ in range(_STEPS):
        chosen = slice(first, first + batch)
        first = (first + batch) % len(x)
        optimizer.zero_grad()
        _loss(manifest, model(x[chosen]), y[chosen]).backward()
        torch.nn.utils.clip_grad_norm_(numbers, 1.0)
        optimizer.step()


if __name__ == "__main__":
    described, size, *files = sys.argv[1:]
    parsed = parse_manifest(Path(described).read_bytes())
    drawn = _read(files[0]) if files else _made_up(parsed, int(size))
    _train(parsed, int(size), *drawn)
    print(peak_resident_bytes() / 1e6)
