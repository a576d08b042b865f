"""The heads of `alibi`, declared in pairs; also refused, although halves of heads could be
exchanged in the whole model.

Source: Press, Smith, Lewis, "Train short, test long", ICLR 2022.
"""

from torch import nn

from models import Cut, architecture
from tests.gallery.alibi import Net

REFUSED = (
    r"units of axis head are not interchangeable.*module out \(Linear\); declare it with "
    r"leading=True"
)


@architecture()
def alibi_pairs(cut: Cut, *, input_shape: tuple[int, ...] = (6, 8), classes: int = 4) -> nn.Module:
    """Build the model."""
    return Net(cut.heads("head", 2, 2) * 2, cut.classes(classes))
