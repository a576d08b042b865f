"""A model that flattens its feature map with the channels first or last."""

from torch import Tensor, nn

from models import Cut, architecture


class Net(nn.Module):
    def __init__(self, first: int, second: int, classes: int, *, channels_last: bool) -> None:
        super().__init__()
        self.channels_last = channels_last
        self.body = nn.Sequential(
            nn.Conv2d(1, first, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(first, second, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Linear(second * 16, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return self.head((x.permute(0, 2, 3, 1) if self.channels_last else x).flatten(1))


@architecture()
def flattened(
    cut: Cut, *, input_shape: tuple[int, ...] = (1, 8, 8), classes: int = 10, channels_last: bool = False
) -> nn.Module:
    return Net(cut.width("first", 16), cut.width("second", 32), cut.classes(classes), channels_last=channels_last)
