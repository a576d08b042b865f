"""Models as a package would define them: sizes in arguments, and no cut."""

from dataclasses import dataclass
from typing import Any
from urllib.error import URLError

import numpy as np
import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Attention over a few tokens, and a hidden layer."""

    def __init__(self, dim: int, num_heads: int, hidden: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        heads = self.qkv(self.norm(x)).reshape(batch, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        scores = (query @ key.transpose(-2, -1)) / query.shape[-1] ** 0.5
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, dim)
        x = x + self.proj(mixed)
        mlp: Tensor = self.mlp(x)
        return x + mlp


class Encoder(nn.Module):
    """Rows of numbers, blocks, and a classifier that returns a dictionary."""

    def __init__(
        self,
        features: int = 5,
        embed_dim: int = 12,
        num_heads: int = 3,
        hidden: int = 10,
        depth: int = 2,
        num_classes: int = 4,
    ) -> None:
        super().__init__()
        if embed_dim % num_heads:
            raise ValueError(f"{embed_dim} is no multiple of {num_heads} heads")
        self.embed = nn.Linear(features, embed_dim)
        blocks = [Block(embed_dim, num_heads, hidden) for _ in range(depth)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(embed_dim, num_classes)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits: Tensor = self.head(self.blocks(self.embed(x)).mean(1))
        return {"logits": logits, "tokens": x}


class TwoStacks(Encoder):
    """An encoder whose rows pass through a second stack of blocks."""

    def __init__(self, embed_dim: int = 12, depth: int = 3, further: int = 2) -> None:
        super().__init__(embed_dim=embed_dim, depth=depth)
        blocks = [Block(embed_dim, 3, 10) for _ in range(further)]
        self.blocks = nn.Sequential(self.blocks, nn.Sequential(*blocks))


@dataclass
class Sizes:
    """The sizes of `Positions`."""

    table: int = 6
    hidden: int = 8


class Positions(nn.Module):
    """Adds a fixed number to each unit of its table, so that no two of them are alike."""

    def __init__(self, sizes: Sizes | None = None, num_classes: int = 3) -> None:
        super().__init__()
        sizes = sizes or Sizes()
        self.first = nn.Linear(4, sizes.table)
        self.second = nn.Linear(sizes.table, sizes.hidden)
        self.head = nn.Linear(sizes.hidden, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = torch.sin(x + torch.arange(x.shape[-1], dtype=x.dtype))
        logits: Tensor = self.head(self.second(x).relu())
        return logits


def positions(width: int = 8, num_classes: int = 3) -> Positions:
    """Make a `Positions`, as a function that names models does."""
    return Positions(Sizes(hidden=width), num_classes)


class Stages(nn.Module):
    """Layers of a list of widths; between two of one width the outputs are added."""

    def __init__(self, widths: tuple[int, ...] = (8, 8, 12), num_classes: int = 3) -> None:
        super().__init__()
        before = (4, *widths[:-1])
        self.layers = nn.ModuleList(map(nn.Linear, before, widths))
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x).tanh()
            x = x + y if x.shape == y.shape else y
        logits: Tensor = self.head(x)
        return logits


class Fitted(nn.Module):
    """Layers of a list of widths; between two of other widths a further layer fits them."""

    def __init__(self, widths: tuple[int, ...] = (8, 16), num_classes: int = 3) -> None:
        super().__init__()
        before = (5, *widths[:-1])
        self.layers = nn.ModuleList(map(nn.Linear, before, widths))
        self.fits = nn.ModuleList()
        for first, second in zip(before, widths, strict=True):
            self.fits.append(nn.Identity() if first == second else nn.Linear(first, second))
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        for layer, fit in zip(self.layers, self.fits, strict=True):
            x = fit(x) + layer(x).tanh()
        logits: Tensor = self.head(x)
        return logits


class Projected(nn.Module):
    """A layer behind heads that is left out if one head is as wide as the stream."""

    def __init__(self, dim: int = 16, heads: int = 4, num_classes: int = 3) -> None:
        super().__init__()
        inner = 4 * heads
        self.first = nn.Linear(5, dim)
        self.heads = nn.Linear(dim, inner)
        has_layer = heads > 1 or inner != dim
        self.out = nn.Linear(inner, dim) if has_layer else nn.Identity()
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.out(self.heads(self.first(x).tanh()).tanh()))
        return logits


class Halving(nn.Module):
    """A hidden layer of half of a size."""

    def __init__(self, width: int = 16, num_classes: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.hidden = nn.Linear(width, int(width * 0.5))
        self.head = nn.Linear(int(width * 0.5), num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(self.first(x).tanh()).tanh())
        return logits


class Tapering(nn.Module):
    """A list of widths each of which must be half of the one before."""

    def __init__(self, widths: tuple[int, ...] = (16, 8), num_classes: int = 3) -> None:
        super().__init__()
        if widths[0] != 2 * widths[1]:
            raise ValueError("each width must be half of the one before")
        self.first = nn.Linear(4, widths[0])
        self.head = nn.Linear(widths[1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(nn.functional.glu(self.first(x).tanh()))
        return logits


class Reducing(nn.Module):
    """Stages with heads, whose keys a convolution makes fewer by a ratio, as in PVT."""

    def __init__(
        self,
        widths: tuple[int, ...] = (4, 8, 24),
        num_heads: tuple[int, ...] = (1, 2, 3),
        ratios: tuple[int, ...] = (4, 2, 1),
        num_classes: int = 3,
    ) -> None:
        super().__init__()
        self.heads = num_heads
        self.stages = nn.ModuleList()
        before = (3, *widths[:-1])
        for inputs, width, heads, ratio in zip(before, widths, num_heads, ratios, strict=True):
            if width % heads:
                raise ValueError(f"{width} is no multiple of {heads} heads")
            layers = {
                "embed": nn.Conv2d(inputs, width, 1),
                "reduce": nn.Conv2d(width, width, ratio, ratio),
                "query": nn.Conv2d(width, width, 1),
                "pair": nn.Conv2d(width, 2 * width, 1),
            }
            self.stages.append(nn.ModuleDict(layers))
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        for layers, heads in zip(self.stages, self.heads, strict=True):
            x = layers["embed"](x)
            split = (heads, x.shape[1] // heads, -1)
            query = layers["query"](x).reshape(len(x), *split)
            pair = layers["pair"](layers["reduce"](x))
            key, value = pair.reshape(len(x), 2, *split).unbind(1)
            mixed = value @ (key.transpose(2, 3) @ query).softmax(-2)
            x = x + mixed.reshape(x.shape)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class Photos(nn.Module):
    """Takes pictures of one size only, with some number of channels."""

    def __init__(
        self, img_size: int = 8, in_chans: int = 3, width: int = 8, num_classes: int = 3
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_chans, width, 1)
        self.places = nn.Parameter(torch.zeros(width, img_size, img_size))
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) + self.places
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class Named(nn.Module):
    """Its own argument has the name of a setting of Shoal."""

    def __init__(self, input_shape: int, width: int = 8, num_classes: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(3 * input_shape, width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.first(x.flatten(1)))
        return logits


class Grouped(nn.Module):
    """Attention whose query heads share key heads; with as many of both it takes another path."""

    def __init__(
        self,
        hidden_size: int = 6,
        num_heads: int = 4,
        num_key_heads: int = 2,
        head_dim: int = 4,
        num_classes: int = 3,
    ) -> None:
        super().__init__()
        self.shared = num_heads // num_key_heads
        self.head_dim = head_dim
        self.embed = nn.Linear(5, hidden_size)
        self.query = nn.Linear(hidden_size, num_heads * head_dim)
        self.key = nn.Linear(hidden_size, num_key_heads * head_dim)
        self.value = nn.Linear(hidden_size, num_key_heads * head_dim)
        self.out = nn.Linear(num_heads * head_dim, hidden_size)
        self.head = nn.Linear(hidden_size, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        batch, length, _ = x.shape
        layers = (self.query, self.key, self.value)
        query, key, value = (
            layer(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for layer in layers
        )
        if self.shared > 1:
            copies = (batch, key.shape[1], self.shared, length, self.head_dim)
            key = key[:, :, None].expand(copies).flatten(1, 2)
            value = value[:, :, None].expand(copies).flatten(1, 2)
        # Places in a head differ, so it cannot become thinner.
        turned = query * torch.arange(1, self.head_dim + 1)
        mixed = (turned @ key.transpose(2, 3)).softmax(-1) @ value
        logits: Tensor = self.head((x + self.out(mixed.transpose(1, 2).flatten(2))).mean(1))
        return logits


class Normed(nn.Module):
    """A norm of groups, which takes no other number of channels than multiples of these."""

    def __init__(self, width: int = 16, num_classes: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.norm = nn.GroupNorm(width // 4, width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.first(x)).tanh())
        return logits


def stack(width: int = 8, num_classes: int = 3) -> nn.Sequential:
    """Make layers in a row, whose constructor has no names for its arguments."""
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, num_classes))


class OnFeatures(nn.Module):
    """A network that gets its first layers from outside, as torchvision's VGG."""

    def __init__(self, features: nn.Sequential, hidden: int = 16, num_classes: int = 3) -> None:
        super().__init__()
        self.features = features
        self.hidden = nn.Linear(16, hidden)
        self.head = nn.Linear(hidden, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(self.features(x)).tanh())
        return logits


def on_features(*, hidden: int = 8, checks: bool = True, **others: Any) -> OnFeatures:
    """Make an `OnFeatures` with layers that a function builds."""
    features = nn.Sequential(nn.Linear(4, 16), nn.Tanh() if checks else nn.Identity())
    return OnFeatures(features, hidden, **others)


def downloading(weights: str | None = "best", num_classes: int = 3) -> nn.Linear:
    """Make a layer, with weights from a server that nobody reaches."""
    if weights is not None:
        raise URLError("the server is unknown")
    return nn.Linear(4, num_classes)


class Tapped(nn.Module):
    """Takes the output of its third block, as DPT, which is built with fewer and does not run."""

    def __init__(self, width: int = 8, depth: int = 4, num_classes: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        outputs = [self.first(x)]
        for block in self.blocks:
            outputs.append(block(outputs[-1]).tanh())
        logits: Tensor = self.head(outputs[3] + outputs[-1])
        return logits


class Rounded(nn.Module):
    """A network of pictures whose code fixes some sizes, and rounds others to multiples of 8."""

    def __init__(self, width: int = 12, num_classes: int = 3) -> None:
        super().__init__()
        width = (width + 7) // 8 * 8
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.grow = nn.Conv2d(width, 48, 1)
        self.depthwise = nn.Conv2d(48, 48, 3, padding=1, groups=48)
        self.norm = nn.GroupNorm(8, 48)
        self.shrink = nn.Conv2d(48, width, 1)
        self.gate = nn.Linear(width, 5)
        self.open = nn.Linear(5, width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.shrink(self.norm(self.depthwise(self.grow(x).relu())).relu())
        scale = self.open(self.gate(y.mean((2, 3))).relu()).sigmoid()
        x = x + y * scale[:, :, None, None]
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class RoundedHeads(nn.Module):
    """Its attention has a fixed number of units, so its layers cannot all be thinner."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.qkv = nn.Linear(5, 48)
        self.head = nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).split(16, -1)
        scores = (query @ key.transpose(-2, -1)).softmax(-1)
        logits: Tensor = self.head((scores @ value).mean(1))
        return logits


class LayerScale(nn.Module):
    """Blocks whose outputs are scaled by a tensor that no layer has, as in ConvNeXt or XCiT."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 5))
        self.stem = nn.Linear(5, 24)
        self.block = nn.Linear(24, 24)
        self.gamma = nn.Parameter(torch.full((24,), 0.5))
        self.same = self.gamma
        self.shape = (1, 24)
        self.attention = nn.MultiheadAttention(24, 3, batch_first=True)
        self.temperature = nn.Parameter(torch.ones(8, 1, 1))
        self.head = nn.Linear(24, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x + self.token)
        x = x + self.gamma.view(self.shape) * self.block(x).tanh() * self.same
        x = self.attention(x, x, x)[0] * self.temperature.mean()
        logits: Tensor = self.head(x.mean(1))
        return logits


class NotedHeads(nn.Module):
    """Attention that splits its queries by a size that its constructor noted, as timm's does."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.heads = 2
        self.head_dim = 24 // self.heads * 2
        self.dim = 1  # that is mixed, and no size
        self.qkv = nn.Linear(5, 3 * self.heads * self.head_dim)
        self.proj = nn.Linear(self.heads * self.head_dim, 16)
        self.head = nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        split = (batch, length, 3, self.heads, self.head_dim)
        query, key, value = self.qkv(x).reshape(split).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = (query @ key.transpose(-2, -1)).softmax(-1) @ value
        logits: Tensor = self.head(self.proj(mixed.transpose(1, 2).flatten(2)).mean(self.dim))
        return logits


class NotedChannels(nn.Module):
    """Splits maps by channels that its constructor noted, as timm's SKNet, CoaT and SHViT do."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 32)
        self.in_channels = 32
        self.features = 5  # of the samples
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(16, 32)
        self.channel_splits = [8, 24]
        self.narrow = nn.Linear(8, 24)
        self.wide = nn.Linear(24, 24)
        self.split_indices = (16, 8)
        self.pdim = 16
        self.part = nn.Linear(16, 8)
        self.head = nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        halves = self.stem(x[:, : self.features]).tanh().split(self.in_channels // 2, 1)
        mixed = self.first(halves[0]).tanh() + self.second(halves[1]).tanh()
        narrow, wide = mixed.split(self.channel_splits, 1)
        joined = self.narrow(narrow).tanh() + self.wide(wide).tanh()
        changed, kept = joined.split(self.split_indices, 1)
        changed = self.part(changed[:, : self.pdim]).tanh()
        logits: Tensor = self.head(torch.cat((changed, kept), 1))
        return logits


class BiasOfHeads(nn.Module):
    """Heads with a bias for each place, which are as many as the units of the first layer."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 16)
        self.heads = nn.Linear(16, 128)
        self.bias_table = nn.Parameter(torch.zeros(4, 16))
        self.head = nn.Linear(128, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.heads(self.stem(x).tanh()).unflatten(-1, (16, -1))
        logits: Tensor = self.head((heads + self.bias_table[..., None]).tanh().flatten(2).mean(1))
        return logits


class Following(nn.Module):
    """Blocks that follow a first, unlike one, and where each unit has its fixed place or none."""

    def __init__(
        self, width: int = 8, repeats: int = 3, is_placed: bool = True, num_classes: int = 3
    ) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.further = nn.ModuleList(nn.Linear(width, width) for _ in range(repeats - 1))
        self.is_placed = is_placed
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        for layer in self.further:
            places = torch.arange(x.shape[-1], dtype=x.dtype)
            x = torch.sin(layer(x) + (places if self.is_placed else 1.0))
        logits: Tensor = self.head(x)
        return logits


class Unlabelled(nn.Module):
    """A model whose configuration has a number of labels, which it does not use."""

    def __init__(self, width: int = 8, num_classes: int = 3) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.layers = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 5))

    def forward(self, x: Tensor) -> Tensor:
        numbers: Tensor = self.layers(x)
        return numbers


class Skipping(nn.Module):
    """A layer that is left out at random in training, numbers that are masked, and dropout."""

    def __init__(
        self,
        width: int = 8,
        layerdrop: float = 0.25,
        mask_prob: float = 0.5,
        dropout: float = 0.5,
        num_classes: int = 3,
    ) -> None:
        super().__init__()
        self.rates = (layerdrop, mask_prob)
        self.first = nn.Linear(4, width)
        self.second = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        layerdrop, mask_prob = self.rates
        if self.training and mask_prob:
            x = x * (np.random.rand() < mask_prob)  # noqa: NPY002 - as packages do
        x = self.dropout(self.first(x))
        if not (self.training and layerdrop and torch.rand([]) < layerdrop):
            x = self.second(x).tanh()
        logits: Tensor = self.head(x)
        return logits


class SharedNoise(nn.Module):
    """Drops entries of a table that all samples share, which are no sample's own."""

    def __init__(
        self, features: int = 4, num_classes: int = 3, table_drop: float = 0.5, drop: float = 0.1
    ) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(features))
        self.table_drop = nn.Dropout(table_drop)
        self.drop = nn.Dropout(drop)
        self.head = nn.Linear(features, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.drop(x * self.table_drop(self.table)))
        return logits


class Rescaled(nn.Module):
    """Divides its own weights in evaluation, in every so many blocks; 0 leaves them alone."""

    def __init__(self, window: int = 4, rescale_every: int = 6, num_classes: int = 3) -> None:
        super().__init__()
        self.window = window
        self.rescale_every = rescale_every
        self.head = nn.Linear(4, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and self.rescale_every:
            with torch.no_grad():
                self.head.weight.div_(2)
        logits: Tensor = self.head(x[:, : self.window])
        return logits


class Tokens(nn.Module):
    """Looks numbers up, which must be whole."""

    def __init__(self, num_tokens: int = 9, width: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(num_tokens, width)
        self.head = nn.Linear(width, num_tokens)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.table(x))
        return logits


class Headless(nn.Module):
    """Returns two outputs, neither of which has the labels of its configuration."""

    def __init__(self, width: int = 8, num_classes: int = 3) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.first = nn.Linear(4, width)
        self.pooler = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x)
        return hidden, self.pooler(hidden)


class WithHidden(nn.Module):
    """Returns hidden numbers before the scores of its labels."""

    def __init__(self, width: int = 8, num_classes: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x)
        return {"hidden": hidden, "scores": self.head(hidden)}


class Refusing(nn.Module):
    """Refuses a stream that is not the number of heads times their size."""

    def __init__(
        self,
        hidden: int = 16,
        num_heads: int = 4,
        head_dim: int = 4,
        inner: int = 4,
        num_classes: int = 3,
    ) -> None:
        super().__init__()
        if hidden != num_heads * head_dim:
            raise ValueError("the stream must be the number of heads times their size")
        self.heads = num_heads
        self.first = nn.Linear(4, hidden)
        self.within = nn.Parameter(torch.randn(head_dim, head_dim))
        self.inner = nn.Linear(hidden, inner)
        self.outer = nn.Linear(inner, hidden)
        self.head = nn.Linear(hidden, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).unflatten(-1, (self.heads, -1))
        # The dimensions of a head are mixed, with the same weights in every head.
        mixed = torch.tanh(hidden @ self.within).flatten(1)
        result: Tensor = self.head(mixed + self.outer(self.inner(mixed).relu()))
        return result


class Masking(nn.Module):
    """Hides numbers of each sample at random, also in evaluation."""

    def __init__(self, width: int = 8, mask_ratio: float = 0.5, num_classes: int = 3) -> None:
        super().__init__()
        self.mask_ratio = mask_ratio
        self.first = nn.Linear(64, width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.rand(x.shape) >= self.mask_ratio
        result: Tensor = self.head(self.first(x * seen).relu())
        return result


class Halves(nn.Module):
    """As in GhostNet: half of the 24 channels of a map are computed from the other half."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3)
        self.primary = nn.Conv2d(24, 12, 1)
        self.cheap = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.head = nn.Linear(24, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).tanh()
        first = self.primary(x).tanh()
        x = x + torch.cat([first, self.cheap(first)], 1)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class Repeated(nn.Module):
    """As in DenseNet: each of the repeated layers adds some units to those before."""

    def __init__(self, growth: int = 6, repeats: int = 3, num_classes: int = 3) -> None:
        super().__init__()
        sizes = [5 + number * growth for number in range(repeats + 1)]
        self.layers = nn.ModuleList(nn.Linear(size, growth) for size in sizes[:-1])
        self.head = nn.Linear(sizes[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x).tanh()], 1)
        logits: Tensor = self.head(x)
        return logits


class Threshold(nn.Module):
    """Adds the places of its units to what it computes where a number of the sample is 7."""

    def __init__(self, width: int = 8, num_classes: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        is_seven = (x == 7.0).any(1, keepdim=True)
        y = self.first(x).tanh()
        places = torch.arange(y.shape[-1], dtype=y.dtype)
        logits: Tensor = self.head(torch.where(is_seven, y + places, y))
        return logits


class Forecast(nn.Module):
    """A series with the times of its values, and with the values that were observed."""

    def __init__(self, features: int = 4, hidden: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(features, hidden)
        self.head = nn.Linear(hidden, features)

    def forward(
        self, values: Tensor, times: Tensor, observed: Tensor, scale: float = 1.0
    ) -> Tensor:
        forecast: Tensor = self.head(self.embed(values * observed + times)) * scale
        return forecast
