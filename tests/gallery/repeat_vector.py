"""A sequence encoded into one vector, which is repeated and decoded.

Source: Srivastava, Mansimov, Salakhutdinov, "Unsupervised learning of video representations using
LSTMs", ICML 2015; Keras's RepeatVector.
"""

from torch import Tensor, nn

from models import Cut, architecture


class Net(nn.Module):
    def __init__(self, hidden: int, code: int, classes: int) -> None:
        super().__init__()
        self.encoder = nn.LSTM(4, code, batch_first=True)
        self.decoder = nn.LSTM(code, hidden, batch_first=True)
        self.output_layer = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        _, (hidden, _) = self.encoder(x)
        repeated = hidden[-1].unsqueeze(1).repeat(1, x.shape[1], 1)
        out: Tensor = self.output_layer(self.decoder(repeated)[0])
        return out


@architecture()
def repeat_vector(
    cut: Cut, *, input_shape: tuple[int, ...] = (4, 4), classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(cut.width("hidden", 6), cut.width("code", 4), cut.classes(classes))
