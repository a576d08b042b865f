"""Layers that need random numbers in training, which an exported graph takes as inputs.

A graph that draws its own random numbers cannot be checked against PyTorch, and the runtimes differ
in what they can draw. So the noise is an input: each layer here needs one uniform tensor, and the
exporter makes that tensor an input of the training graph, which the device fills from a seeded
generator. Without such an input, a layer draws from torch's generator, like torch's own layers.

The exporter runs::

    set_mode(model, "train")
    shapes = noise_shapes(model, x)  # {"dropout": (7, 16), ...}, without the batch dimension
    feed_noise(model, {name: placeholder(batch, *shape) for name, shape in shapes.items()})
    ... trace ...
    feed_noise(model, {})

Only torch's training flag matters (`set_mode` sets it): in the modes ``eval`` and ``statistics``
every layer here is the identity.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fleet_protocol.errors import ConfigError, ExportError

_ROW = 2  # dimensions of noise that has one row for each sample, for several uses in turn

Shape = tuple[int, ...]


class NoiseLayer(nn.Module):
    """A layer that needs one uniform tensor for each forward pass in training.

    Attributes:
        rate: share of entries that it changes, in [0, 1); 0 makes it the identity.
        noise: uniform in [0, 1), set by `feed_noise`; None to draw it here.
        used: numbers of each sample used since then.
        input_shapes: shapes of the inputs since `noise_shapes` began to record; None when it does
            not.
    """

    def __init__(self, rate: float) -> None:
        """Create the layer; raises a ConfigError for a share outside [0, 1)."""
        super().__init__()
        if not 0.0 <= rate < 1.0:
            raise ConfigError(f"a share of {rate} cannot be dropped or masked; use one in [0, 1)")
        self.rate = rate
        self.noise: Tensor | None = None
        self.used = 0
        self.input_shapes: list[Shape] | None = None

    @property
    def active(self) -> bool:
        """Return whether the layer needs noise in its current mode."""
        return self.training and self.rate > 0.0

    def uniform(self, x: Tensor) -> Tensor:
        """Give the noise for an input of any dtype: float32 of its shape, uniform in [0, 1)."""
        if self.input_shapes is not None:
            self.input_shapes.append(tuple(x.shape))
        if self.noise is None:
            return torch.rand(x.shape, device=x.device)
        if self.noise.dim() != _ROW:
            return self.noise
        start = self.used
        self.used += x.numel() // self.noise.shape[0]
        return self.noise[:, start : self.used].reshape(x.shape)


class Dropout(NoiseLayer):
    """Sets a share of the entries to 0 in training.

    The other entries are scaled up, so that the mean stays. An entry is kept where its noise is at
    least the rate.
    """

    # number of leading dimensions whose entries are dropped as a whole; None for single entries
    _leading: int | None = None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name that PyTorch's has
        """Return the input, in training with some entries 0; any float shape."""
        x = input
        if not self.active:
            return x
        return dropped(x, self.uniform(x), self.rate, self._leading)


def dropped(x: Tensor, noise: Tensor, rate: float, leading: int | None) -> Tensor:
    """Return x with a share of its entries 0 and the others scaled up.

    Args:
        x: any float shape.
        noise: noise of its shape, uniform in [0, 1).
        rate: the share.
        leading: dimensions whose entries are dropped as a whole, with everything behind them; None
            for single entries.
    """
    if leading is not None and x.dim() > leading:
        noise = noise.flatten(leading)[..., 0]
    kept = (noise >= rate).to(x.dtype)
    if noise.dim() < x.dim():
        kept = kept.view(*noise.shape, *(1,) * (x.dim() - noise.dim()))
    return x * (kept * (1.0 / (1.0 - rate)))


class ChannelDropout(Dropout):
    """Sets whole channels to 0 in training, and scales the others up.

    A channel, of float [batch, channels, ...], is kept where the first noise of its entries is at
    least the rate.
    """

    _leading = 2


class SampleDropout(ChannelDropout):
    """Sets a share of the samples to 0 in training, as stochastic depth does to a branch.

    Huang et al.: "Deep networks with stochastic depth", ECCV 2016.
    """

    _leading = 1


class TokenMask(NoiseLayer):
    """Replaces a share of the tokens by a mask symbol in training (specification 1.8).

    Each batch has different masks. A token is replaced where its noise is below the rate.
    """

    def __init__(self, rate: float, symbol: int) -> None:
        """Make the layer for a mask symbol, which is a token id."""
        super().__init__(rate)
        self.symbol = symbol

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the tokens, int64 of any shape; in training, some are masked."""
        if not self.active:
            return tokens
        return torch.where(self.uniform(tokens) < self.rate, self.symbol, tokens)


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
        ExportError: the input of a layer does not grow with the batch.
    """
    uses = _input_shapes(module, x)
    batch = len(x)
    if all(len(shapes) == 1 and shapes[0][:1] == (batch,) for shapes in uses.values()):
        return {path: shapes[0][1:] for path, shapes in uses.items()}
    # A size may equal the batch size by chance; a batch with one more sample reveals it.
    larger_uses = _input_shapes(module, torch.cat([x, x[:1]]))
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
