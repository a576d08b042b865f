"""torch.nn.TransformerEncoderLayer, whose residual stream is cut inside the heads.

Source: PyTorch's tutorial "Language modeling with nn.Transformer".
"""

from torch import Tensor, nn

from models import Cut, architecture

ALONE = False


class Net(nn.Module):
    """One layer over a short sequence."""

    def __init__(self, dim: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Linear(8, dim)
        self.head = nn.Linear(dim, classes)
        self.layer = nn.TransformerEncoderLayer(dim, 4, hidden, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.embed(x)).mean(1))
        return out


@architecture()
def torch_encoder_layer(
    cut: Cut, *, input_shape: tuple[int, ...] = (5, 8), classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(cut.heads("stream", 4, 4) * 4, cut.width("hidden", 24), cut.classes(classes))
