"""A signal shortened by strides and lengthened by transposed convolutions.

Source: Stoller, Ewert, Dixon, "Wave-U-Net", ISMIR 2018; the decoder of many one-dimensional
autoencoders.
"""

from torch import Tensor, nn

from models import Cut, architecture


class Net(nn.Module):
    def __init__(self, first: int, second: int, classes: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv1d(2, first, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv1d(first, second, 4, 2, 1),
            nn.LeakyReLU(0.2),
        )
        self.decoder = nn.Sequential(
            nn.ConvTranspose1d(second, first, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose1d(first, 3, 4, 2, 1),
            nn.Tanh(),
        )
        self.fc = nn.Linear(3 * 12, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.decoder(self.encoder(x)).flatten(1))
        return out


@architecture()
def deconv1d(cut: Cut, *, input_shape: tuple[int, ...] = (2, 12), classes: int = 4) -> nn.Module:
    """Build the model."""
    return Net(cut.width("first", 4), cut.width("second", 6), cut.classes(classes))
