"""Adapters of other packages keep the scaling of the whole adapter in narrow sub-models."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fleet_protocol.errors import ConfigError
from models import Cut, architecture, infer_layout
from models.architecture import build
from models.zoo.conversion_plan import convert_where_needed
from models.zoo.lora_scaling import scalings_of


class Lora(nn.Module):
    """A layer in the form of peft's: factors and scalings by the name of the adapter."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(requires_grad=False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.scaling = {"default": alpha / rank}

    def forward(self, x: Tensor) -> Tensor:
        low = self.lora_A["default"](x)
        out: Tensor = self.base_layer(x) + self.lora_B["default"](low) * self.scaling["default"]
        return out


class LoraNumber(Lora):
    """The same in the form of loralib: one scaling, a number."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__(base, rank, alpha)
        self.scaling = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        low = self.lora_A["default"](x)
        out: Tensor = self.base_layer(x) + self.lora_B["default"](low) * self.scaling
        return out


class Hada(nn.Module):
    """A layer in the form of peft's LoHa: an elementwise product of two products of factors."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(requires_grad=False)
        for number in (1, 2):
            for side, sizes in (("a", (base.out_features, rank)), ("b", (rank, base.in_features))):
                factors = nn.ParameterDict({"default": nn.Parameter(torch.randn(sizes))})
                setattr(self, f"hada_w{number}_{side}", factors)
        self.scaling = {"default": alpha / rank}

    def forward(self, x: Tensor) -> Tensor:
        one = self.hada_w1_a["default"] @ self.hada_w1_b["default"]
        two = self.hada_w2_a["default"] @ self.hada_w2_b["default"]
        out: Tensor = self.base_layer(x) + x @ (one * two * self.scaling["default"]).T
        return out


@architecture()
def by_products(
    cut: Cut, *, input_shape: tuple[int, ...] = (6,), classes: int = 3, alpha: int = 16
) -> nn.Module:
    layer = Hada(nn.Linear(6, 5), cut.width("rank", 8), alpha)
    return nn.Sequential(layer, nn.ReLU(), nn.Linear(5, cut.classes(classes)))


@architecture()
def by_name(
    cut: Cut, *, input_shape: tuple[int, ...] = (6,), classes: int = 3, alpha: int = 16
) -> nn.Module:
    layer = Lora(nn.Linear(6, 5), cut.width("rank", 8), alpha)
    return nn.Sequential(layer, nn.ReLU(), nn.Linear(5, cut.classes(classes)))


@architecture()
def by_number(
    cut: Cut, *, input_shape: tuple[int, ...] = (6,), classes: int = 3, alpha: int = 16
) -> nn.Module:
    layer = LoraNumber(nn.Linear(6, 5), cut.width("rank", 8), alpha)
    return nn.Sequential(layer, nn.ReLU(), nn.Linear(5, cut.classes(classes)))


@architecture()
def fixed(
    cut: Cut, *, input_shape: tuple[int, ...] = (6,), classes: int = 3, multiple: int = 2
) -> nn.Module:
    rank = cut.width("rank", 8)
    layer = Lora(nn.Linear(6, 5), rank, multiple * rank)
    return nn.Sequential(layer, nn.ReLU(), nn.Linear(5, cut.classes(classes)))


@pytest.mark.parametrize("arch", [by_name, by_number, by_products])
def test_the_scaling_is_that_of_the_whole_adapter(arch):
    """As Shoal's own adapters have it; the conversion says so."""
    assert [*scalings_of(build(arch, 0.5)).values()] == [4.0]
    kept, replaced = convert_where_needed(arch)
    assert [entry.old for entry in replaced] == ["a scaling by its own rank"]
    for width in (1.0, 0.5, 0.25):
        assert [*scalings_of(build(kept, width)).values()] == [2.0]
    alpha = arch.settings({"alpha": 4})
    assert [*scalings_of(build(kept, 0.25, settings=alpha)).values()] == [0.5]
    assert infer_layout(kept).axes["rank"].size == 8


def test_the_narrow_adapter_is_a_slice_of_the_whole_one():
    """With the other units at zero, the whole model computes the same."""
    kept, _ = convert_where_needed(by_name)
    whole = build(kept, 1.0)
    narrow = build(kept, 0.5)
    with torch.no_grad():
        whole[0].lora_B["default"].weight[:, 4:] = 0
        for name, value in narrow.named_parameters():
            source = whole.get_parameter(name)
            value.copy_(source[tuple(slice(size) for size in value.shape)])
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    np.testing.assert_allclose(narrow(x).detach(), whole(x).detach(), rtol=1e-5, atol=1e-6)


def test_without_the_conversion_it_is_refused_with_a_remedy():
    """And a model that follows the remedy is accepted, and stays the same object."""
    with pytest.raises(ConfigError, match=r"adapter of 0 \(2 in the whole model, 4 at width 0\.5"):
        infer_layout(by_name)
    assert infer_layout(fixed).axes["rank"].size == 8
    assert convert_where_needed(fixed) == (fixed, ())
