"""The mean of a bag of words, then a linear classifier.

Source: Joulin et al., "Bag of tricks for efficient text classification", EACL 2017.
"""

from torch import Tensor, nn

from models import Cut, architecture


class Net(nn.Module):
    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(20, dim, mode="mean")
        self.fc = nn.Linear(dim, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.fc(self.embedding(tokens))
        return out


@architecture(input_dtype="int64")
def fasttext(cut: Cut, *, input_shape: tuple[int, ...] = (6,), classes: int = 4) -> nn.Module:
    """Build the model."""
    return Net(cut.width("dim", 8), cut.classes(classes))
