"""Alternating layers over patches and over channels.

Source: Tolstikhin et al., "MLP-Mixer", NeurIPS 2021.
"""

from torch import Tensor, nn

from models import Cut, architecture

ALONE = False


class Mixer(nn.Module):
    def __init__(self, patches: int, dim: int, tokens: int, channels: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.tokens = nn.Sequential(
            nn.Linear(patches, tokens), nn.GELU(), nn.Linear(tokens, patches)
        )
        self.channels = nn.Sequential(nn.Linear(dim, channels), nn.GELU(), nn.Linear(channels, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        out: Tensor = x + self.channels(self.norm2(x))
        return out


class Net(nn.Module):
    def __init__(self, sizes: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, sizes[0], 2, 2)
        self.mixer = Mixer(16, *sizes)
        self.norm = nn.LayerNorm(sizes[0])
        self.head = nn.Linear(sizes[0], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        out: Tensor = self.head(self.norm(self.mixer(x)).mean(1))
        return out


@architecture()
def mlp_mixer(cut: Cut, *, input_shape: tuple[int, ...] = (3, 8, 8), classes: int = 4) -> nn.Module:
    """Build the model."""
    return Net(
        (cut.width("dim", 12), cut.width("tokens", 10), cut.width("channels", 16)),
        cut.classes(classes),
    )
