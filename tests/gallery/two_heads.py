"""Two heads on one body, for class and position, weighted by the author's own loss.

Source: Girshick, "Fast R-CNN", ICCV 2015: the multi-task loss of section 2.3.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from models import Cut, architecture
from shoal import loss


class Net(nn.Module):
    """A classifier beside a regression of four coordinates."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.body = nn.Linear(9, hidden)
        self.label = nn.Linear(hidden, classes)
        self.box = nn.Linear(hidden, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.body(x).tanh()
        return {"label": self.label(x), "box": self.box(x)}


@architecture()
def two_heads(cut: Cut, *, input_shape: tuple[int, ...] = (9,), classes: int = 4) -> nn.Module:
    """Build the model."""
    return Net(cut.width("hidden", 12), cut.classes(classes))


@loss({"label": "int64", "box": "float32"}, {"box": (4,)})
def multi_task(outputs: Any, targets: Any, *, weight: float = 1.0) -> Tensor:
    """The loss of both; label 0 is the background, which lies nowhere."""
    named = functional.cross_entropy(outputs["label"], targets["label"], reduction="none")
    placed = functional.smooth_l1_loss(outputs["box"], targets["box"], reduction="none").sum(1)
    return named + weight * (targets["label"] > 0) * placed


LOSS = multi_task(weight=0.5)
