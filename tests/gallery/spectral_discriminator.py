"""A discriminator whose weights are divided by their largest singular values.

Source: Miyato, Kataoka, Koyama, Yoshida, "Spectral normalization for generative adversarial
networks", ICLR 2018.
"""

from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from models import Cut, architecture

ALONE = False
CONVERT = True


@architecture()
def spectral_discriminator(
    cut: Cut, *, input_shape: tuple[int, ...] = (2, 6, 6), classes: int = 3
) -> nn.Module:
    """Build the model."""
    first = cut.width("first", 6)
    second = cut.width("second", 4)
    return nn.Sequential(
        spectral_norm(nn.Conv2d(2, first, 3)),
        nn.LeakyReLU(0.1),
        spectral_norm(nn.ConvTranspose2d(first, second, 3, bias=False), dim=1),
        nn.LeakyReLU(0.1, inplace=True),
        nn.Flatten(),
        spectral_norm(nn.Linear(second * 36, cut.classes(classes))),
    )
