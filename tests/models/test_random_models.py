"""A model that draws random numbers is refused for that, and what the message advises is done and
holds.
"""

import pytest
import torch
from torch import Tensor, nn

from fleet_protocol.errors import ConfigError
from models import Cut, architecture, build, infer_layout
from models.zoo.dropout import NoiseLayer
from tests.trainer_export.helpers import train_report
from trainer_export.model_inputs import Signature


class Logistic(NoiseLayer):
    """Numbers of the logistic distribution while a model trains, and zeros elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.active:
            return torch.zeros_like(x)
        drawn = self.uniform(x).clamp(0.01, 0.99)
        return torch.log(drawn / (1 - drawn))


class Variational(nn.Module):
    """Half of what the encoder says is how far the other half is moved at random."""

    def __init__(self, code: int, classes: int, *, as_advised: bool) -> None:
        super().__init__()
        self.encoder = nn.Linear(5, 2 * code)
        self.decoder = nn.Linear(code, classes)
        self.noise = Logistic(0.5) if as_advised else torch.randn_like

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + self.noise(spread) * torch.exp(spread / 2))


@architecture()
def variational(
    cut: Cut, *, input_shape: tuple[int, ...] = (5,), classes: int = 3, as_advised: bool = False
) -> nn.Module:
    """Build the model."""
    return Variational(cut.width("code", 8), cut.classes(classes), as_advised=as_advised)


def test_a_model_that_draws_random_numbers() -> None:
    """The message says what it is, and with a layer for the numbers the model is cut and trains as
    in PyTorch.
    """
    with pytest.raises(
        ConfigError,
        match=r"numbers \(randn_like in line \d+ of test_random_models.py\); draw them with a NoiseLayer",
    ):
        infer_layout(variational)
    advised = {"as_advised": True}
    assert infer_layout(variational, advised).axes["code"].size == 8
    torch.manual_seed(3)
    module = build(variational, 0.5, settings=advised)
    assert train_report(module, Signature((5,), "float32", 3), sizes=(3, 2)).worst_absolute <= 1e-5


class FixedFeatures(nn.Module):
    """Multiplies its units by numbers that were drawn once, for ever."""

    def __init__(self, units: int, classes: int, *, as_advised: bool) -> None:
        super().__init__()
        self.encoder = nn.Linear(5, units)
        self.decoder = nn.Linear(units, classes)
        drawn = torch.linspace(0.5, 2, units)
        if as_advised:
            self.scale = nn.Parameter(drawn, requires_grad=False)
        else:
            self.register_buffer("scale", drawn)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder((self.encoder(x) * self.scale).relu())


@architecture()
def fixed(
    cut: Cut, *, input_shape: tuple[int, ...] = (5,), classes: int = 3, as_advised: bool = False
) -> nn.Module:
    """Build the model."""
    return FixedFeatures(cut.width("units", 8), cut.classes(classes), as_advised=as_advised)


def test_a_buffer_with_a_place_for_each_unit() -> None:
    """As a frozen parameter it is cut with them."""
    with pytest.raises(
        ConfigError, match="make buffer scale a parameter whose entries belong to the units"
    ):
        infer_layout(fixed)
    assert infer_layout(fixed, {"as_advised": True}).axes["units"].size == 8
