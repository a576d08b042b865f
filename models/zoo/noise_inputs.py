"""The noise that the layers of a model need for a batch: its shapes, and how it reaches them."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fleet_protocol.errors import ExportError
from models.zoo.dropout import NoiseLayer, Shape


def noise_layers(module: nn.Module) -> dict[str, NoiseLayer]:
    """Return the layers that need noise in the current mode, by dotted path; none in evaluation."""
    active: dict[str, NoiseLayer] = {}
    for path, layer in _all_noise_layers(module).items():
        if layer.active:
            active[path] = layer
    return active


def _all_noise_layers(module: nn.Module) -> dict[str, NoiseLayer]:
    layers: dict[str, NoiseLayer] = {}
    for path, layer in module.named_modules():
        if isinstance(layer, NoiseLayer):
            layers[path] = layer
    return layers


def noise_shapes(module: nn.Module, x: Tensor) -> dict[str, Shape]:
    """Return the shape of the noise that each layer needs, by running the model.

    Args:
        module: the model, in the mode of the trace. torch's random state is not changed.
        x: a batch of samples.

    Returns:
        For each layer of `noise_layers` that is used, the shape of its noise without the leading
            batch dimension: that of its input, or a row of numbers if a layer is used several times
                or not with the batch first.

    Raises:
        ExportError: the input of a layer does not grow with the batch, or a layer is not always
            used.
    """
    uses = _input_shapes(module, x)
    batch = len(x)
    if all(len(shapes) == 1 and shapes[0][:1] == (batch,) for shapes in uses.values()):
        return {path: shapes[0][1:] for path, shapes in uses.items()}
    # A size may equal the batch size by chance; a batch with one more sample reveals it.
    larger_uses = _input_shapes(module, torch.cat([x, x[:1]]))
    skipped = uses.keys() ^ larger_uses.keys()
    if skipped:
        raise ExportError(
            f"in training, the model uses layer {min(skipped)} for some batches only, and a graph"
            " would always use it or never; use every layer in training, and drop its result with a"
            " NoiseLayer of models.zoo.dropout"
        )
    rows: dict[str, Shape] = {}
    for path, shapes in uses.items():
        if not _grows(shapes, larger_uses[path], batch):
            raise ExportError(
                f"layer {path} draws noise for {', '.join(map(str, shapes))} with a batch of"
                f" {batch}, which is not divisible among the samples; apply it to a tensor with"
                " a batch dimension, or use rate 0"
            )
        rows[path] = (sum(map(math.prod, shapes)) // batch,)
    return rows


def _grows(shapes: list[Shape], larger: list[Shape], batch: int) -> bool:
    """Return whether every input grew in proportion to the batch, with one more sample."""
    # Cross-multiplied, to compare the ratios of sizes and batches without a division.
    expected = [math.prod(shape) * (batch + 1) for shape in shapes]
    return expected == [math.prod(shape) * batch for shape in larger]


def _input_shapes(module: nn.Module, x: Tensor) -> dict[str, list[Shape]]:
    """Run a model once and return the shapes of the inputs of each layer that needs noise."""
    layers = noise_layers(module)
    uses: dict[str, list[Shape]] = {path: [] for path in layers}
    try:
        for path, layer in layers.items():
            layer.input_shapes = uses[path]
        if layers:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                module(x)
    finally:
        for layer in layers.values():
            layer.input_shapes = None
    # A model may skip a layer; its noise would then be an unused input.
    used: dict[str, list[Shape]] = {}
    for path, shapes in uses.items():
        if shapes:
            used[path] = shapes
    return used


def feed_noise(module: nn.Module, noise: Mapping[str, Tensor]) -> None:
    """Set the noise of layers of a model, by dotted path: float32 [batch, ...] in [0, 1).

    Other layers draw their own noise, so an empty mapping undoes an earlier call.

    Raises:
        ExportError: the model has no such layer.
    """
    layers = _all_noise_layers(module)
    unknown = noise.keys() - layers.keys()
    if unknown:
        raise ExportError(
            f"the model has no noise layer {min(unknown)!r}; its noise layers are"
            f" {', '.join(layers)}"
        )
    for path, layer in layers.items():
        layer.noise = noise.get(path)
        layer.used = 0
