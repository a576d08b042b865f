"""Learned queries that attend to an image through PyTorch's decoder layer.

Source: Carion et al., "End-to-end object detection with transformers", ECCV 2020.
"""

import torch
from torch import Tensor, nn

from models import Cut, architecture

ALONE = False
CONVERT = True


class Net(nn.Module):
    def __init__(self, dim: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(3, dim, 3, 3)
        self.queries = nn.Parameter(torch.rand(2, dim))
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(dim, 2, hidden, batch_first=True), 1
        )
        self.linear_class = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        memory = self.backbone(x).flatten(2).permute(0, 2, 1)
        queries = self.queries.unsqueeze(0).repeat(memory.shape[0], 1, 1)
        out: Tensor = self.linear_class(self.decoder(queries, memory)).mean(1)
        return out


@architecture()
def cross_attention(
    cut: Cut, *, input_shape: tuple[int, ...] = (3, 6, 6), classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(cut.heads("stream", 2, 4) * 2, cut.width("hidden", 12), cut.classes(classes))
