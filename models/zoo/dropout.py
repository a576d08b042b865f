"""Layers that need random numbers in training, which an exported graph takes as inputs.

A graph that draws its own random numbers cannot be checked against PyTorch, and the runtimes differ
in what they can draw. So the noise is an input: each layer here needs one uniform tensor, and the
exporter makes that tensor an input of the training graph, which the device fills from a seeded
generator. Without such an input, a layer draws from torch's generator, like torch's own layers.

The exporter runs (with functions of `models.zoo.noise_inputs`)::

    set_mode(model, "train")
    shapes = noise_shapes(model, x)  # {"dropout": (7, 16), ...}, without the batch dimension
    feed_noise(model, {name: placeholder(batch, *shape) for name, shape in shapes.items()})
    ... trace ...
    feed_noise(model, {})

Only torch's training flag matters (`set_mode` sets it): in the modes ``eval`` and ``statistics``
every layer here is the identity.
"""

import torch
from torch import Tensor, nn

from fleet_protocol.errors import ConfigError

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
