"""Layers that need random numbers in training, and take them from outside where a graph is
exported.

A graph that draws its own random numbers cannot be checked against PyTorch, and the runtimes differ
in what they can draw. So the noise is an input: each layer here turns one uniform tensor into what
it does, and the exporter makes that tensor an input of the training graph, which the device fills
from a seeded generator. Left alone, a layer draws from torch's generator, as torch's own layers do.

What an exporter does::

    set_mode(model, "train")
    shapes = noise_shapes(model, x)                  # {"dropout": (7, 16), ...}, without the batch dimension
    feed_noise(model, {name: placeholder(batch, *shape) for name, shape in shapes.items()})
    ... trace ...
    feed_noise(model, {})

Only torch's training flag counts (`set_mode` sets it): in the modes ``eval`` and ``statistics``
every layer here is the identity.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fleet_protocol.errors import ConfigError, ExportError

_ROW = 2  # dimensions of noise that lies sample by sample in a row, for one use behind the other


class NoiseLayer(nn.Module):
    """A layer that needs one uniform tensor for each forward pass in training.

    Attributes:
        rate: share of entries that it changes, in [0, 1); 0 makes it the identity.
        noise: uniform in [0, 1), set by `feed_noise`; None to draw it here.
        taken: numbers of each sample that were used since.
        seen: shapes of the inputs since `noise_shapes` began to record; None when it does not.
    """

    def __init__(self, rate: float) -> None:
        """Make the layer; a share outside [0, 1) is a ConfigError."""
        super().__init__()
        if not 0.0 <= rate < 1.0:
            raise ConfigError(
                f"a share of {rate} cannot be dropped or masked; choose one in [0, 1)"
            )
        self.rate = rate
        self.noise: Tensor | None = None
        self.taken = 0
        self.seen: list[tuple[int, ...]] | None = None

    @property
    def active(self) -> bool:
        """Whether the layer needs noise at the moment."""
        return self.training and self.rate > 0.0

    def uniform(self, x: Tensor) -> Tensor:
        """Give the noise for an input of any dtype: float32 of its shape, uniform in [0, 1)."""
        if self.seen is not None:
            self.seen.append(tuple(x.shape))
        if self.noise is None:
            return torch.rand(x.shape, device=x.device)
        if self.noise.dim() != _ROW:
            return self.noise
        start, self.taken = self.taken, self.taken + x.numel() // self.noise.shape[0]
        return self.noise[:, start : self.taken].reshape(x.shape)


class Dropout(NoiseLayer):
    """Sets a share of the entries to 0 in training and scales the others up, so that the mean
    stays.

    An entry is kept where its noise is at least the rate.
    """

    _leading: int | None = (
        None  # dimensions that tell apart what is dropped whole; None for all of them
    )

    def forward(self, x: Tensor) -> Tensor:
        """Return x or, in training, what is left of it; any float shape."""
        if not self.active:
            return x
        noise = self.uniform(x)
        if self._leading is not None and x.dim() > self._leading:
            noise = noise.flatten(self._leading)[..., 0]
        kept = (noise >= self.rate).to(x.dtype)
        if noise.dim() < x.dim():
            kept = kept.view(*noise.shape, *(1,) * (x.dim() - noise.dim()))
        return x * (kept * (1.0 / (1.0 - self.rate)))


class ChannelDropout(Dropout):
    """Sets a share of the channels to 0 in training, each whole, and scales the others up, so that
    the mean stays.

    A channel, of float [batch, channels, ...], is kept where the first noise of its entries is at
    least the rate.
    """

    _leading = 2


class SampleDropout(ChannelDropout):
    """The same with whole samples, as stochastic depth does to a residual branch.

    Huang et al.: "Deep networks with stochastic depth", ECCV 2016.
    """

    _leading = 1


class TokenMask(NoiseLayer):
    """Replaces a share of the tokens by a mask symbol in training, anew for each batch
    (specification 1.8).

    A token is replaced where its noise is below the rate.
    """

    def __init__(self, rate: float, symbol: int) -> None:
        """Make the layer, which puts the id of the mask symbol in the place of a share of the
        tokens.
        """
        super().__init__(rate)
        self.symbol = symbol

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the tokens, int64 of any shape, in training with masks among them."""
        return (
            tokens
            if not self.active
            else torch.where(self.uniform(tokens) < self.rate, self.symbol, tokens)
        )


def noise_layers(module: nn.Module) -> dict[str, NoiseLayer]:
    """The layers of a model that need noise in the mode it is in, by dotted path.

    None in evaluation.
    """
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, NoiseLayer) and layer.active
    }


def noise_shapes(module: nn.Module, x: Tensor) -> dict[str, tuple[int, ...]]:
    """Find the shape of the noise that each layer needs, by running the model once.

    Args:
        module: the model, in the mode it is to be traced in. torch's random state is left as it
            was.
        x: a batch of samples.

    Returns:
        For each layer of `noise_layers` that is used, the shape of its noise without the leading
            batch dimension: that of its input, or a row of numbers in models that use one several
            times, or not with the batch first.

    Raises:
        ExportError: if a layer is used on something that does not grow with the batch.
    """
    few = _uses(module, x)
    if all(len(seen) == 1 and seen[0][:1] == x.shape[:1] for seen in few.values()):
        return {name: seen[0][1:] for name, seen in few.items()}
    many = _uses(module, torch.cat([x, x[:1]]))
    for name, seen in few.items():
        if [math.prod(shape) * (len(x) + 1) for shape in seen] != [
            math.prod(shape) * len(x) for shape in many[name]
        ]:
            raise ExportError(
                f"layer {name} draws noise for {', '.join(map(str, seen))} with a batch of {len(x)}, which is not so"
                " much for each sample; use it on what has the batch among its dimensions, or give it rate 0"
            )
    return {name: (sum(map(math.prod, seen)) // len(x),) for name, seen in few.items()}


def _uses(module: nn.Module, x: Tensor) -> dict[str, list[tuple[int, ...]]]:
    """The shapes of what each layer gets, by running the model once."""
    layers = noise_layers(module)
    uses: dict[str, list[tuple[int, ...]]] = {name: [] for name in layers}
    try:
        for name, layer in layers.items():
            layer.seen = uses[name]
        if layers:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                module(x)
    finally:
        for layer in layers.values():
            layer.seen = None
    return {name: seen for name, seen in uses.items() if seen}


def feed_noise(module: nn.Module, noise: Mapping[str, Tensor]) -> None:
    """Set where the layers of a model take their noise from: float32 [batch, ...], uniform in [0,
    1), by dotted path.

    Layers that are not named draw their own, so an empty mapping undoes an earlier call. An unknown
    one is an ExportError.
    """
    layers = {
        name: layer for name, layer in module.named_modules() if isinstance(layer, NoiseLayer)
    }
    unknown = noise.keys() - layers.keys()
    if unknown:
        raise ExportError(
            f"the model has no layer {min(unknown)!r} that takes noise; it has {', '.join(layers)}"
        )
    for name, layer in layers.items():
        layer.noise = noise.get(name)
        layer.taken = 0
