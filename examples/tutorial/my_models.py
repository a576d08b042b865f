"""A model of your own: plain PyTorch, whose sizes that may shrink come from ``cut``."""

from torch import Tensor, nn

from shoal import Cut, architecture


class SmallCnn(nn.Module):
    """Two convolutions and a classifier."""

    def __init__(self, image: tuple[int, int, int], first: int, second: int, classes: int) -> None:
        super().__init__()
        channels, height, width = image
        self.features = nn.Sequential(
            nn.Conv2d(channels, first, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Linear(second * (height // 4) * (width // 4), classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images, float32 [batch, channels, height, width], to logits [batch, classes]."""
        return self.classifier(self.features(x).flatten(1))


@architecture()
def small_cnn(
    cut: Cut, *, input_shape: tuple[int, int, int] = (1, 8, 8), classes: int = 10
) -> nn.Module:
    """Build it at the width that ``cut`` stands for."""
    return SmallCnn(
        input_shape, cut.width("first", 24), cut.width("second", 48), cut.classes(classes)
    )
