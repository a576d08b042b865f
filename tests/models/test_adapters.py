"""Adapters: what trains, what a tier keeps of them, and that a unit of the rank means the same in
every tier.
"""

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fleet_protocol.errors import ConfigError, PlanError
from models import Cut, Layout, architecture, build, infer_layout, make_plan, slice_weights
from models.zoo.adapters import Adapters, LoraLinear, with_adapters
from tests.adapted import BASE, adapted, half_frozen


def test_what_is_frozen_and_whole_is_the_base_and_in_no_tiers_weights():
    """Frozen tensors are no parameters of the fleet; the layout says so, also after it was written
    and read.
    """
    layout = infer_layout(adapted)
    names = ["1.down", "1.up", "3.down", "3.up", "5.weight", "5.bias"]
    assert [item.name for item in layout.parameters] == names
    assert tuple(item.name for item in layout.base) == BASE
    assert layout.shapes(layout.tier(0.25))["1.up"] == (48, 2)
    assert Layout.from_json(layout.to_json()) == layout


def test_a_layer_computes_the_frozen_product_and_the_scaled_one():
    """W x + b + alpha / rank * up (down x), with the numbers of numpy."""
    layer = LoraLinear(nn.Linear(5, 3), 2, 1.5)
    nn.init.normal_(layer.up)
    x = torch.randn(4, 5)
    w, b, down, up = (
        value.detach().double().numpy()
        for value in (layer.weight, layer.bias, layer.down, layer.up)
    )
    expected = x.double().numpy() @ (w + 1.5 * up @ down).T + b
    np.testing.assert_allclose(layer(x).detach().numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [0.5, 0.25])
def test_a_narrow_tier_is_the_whole_model_without_the_other_units(width):
    """The scale is that of the whole rank in every tier: a sub-model computes what the zeroed whole
    one computes.
    """
    layout = infer_layout(adapted)
    whole, small = (build(adapted, value) for value in (1.0, width))
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.1)
    state = {name: value.detach().numpy() for name, value in whole.named_parameters()}
    cut = slice_weights(
        layout, make_plan(layout, layout.tier(width)), {k: state[k] for k in state if k not in BASE}
    )
    small.load_state_dict({name: torch.tensor(value) for name, value in {**state, **cut}.items()})
    kept = round(8 * width)
    with torch.no_grad():
        for path in ("1", "3"):
            whole.get_submodule(path).up[:, kept:] = 0
    x = torch.randn(6, 1, 8, 8)
    torch.testing.assert_close(small(x), whole(x))


def test_a_frozen_tensor_that_a_width_cuts_has_the_leading_units_in_a_tiers_base():
    """It is in no weights either; plans that move are refused, and what the message advises is
    not.
    """
    layout = infer_layout(half_frozen)
    tier = layout.tier(0.5)
    assert "1.weight" not in layout.shapes(tier)
    assert layout.base_of(tier) == {"1.weight": (24, 64), "1.bias": (24,)}
    make_plan(layout, tier)
    for kind in ("rolling", "random"):
        with pytest.raises(
            PlanError,
            match=r"1\.weight is frozen, and a width cuts it.*cut\.whole\(\), make it trainable",
        ):
            make_plan(layout, tier, kind)
        for remedy in ({"whole": True}, {"frozen": False}):
            other = infer_layout(half_frozen, remedy)
            make_plan(other, other.tier(0.5), kind, round_index=1)


def test_patterns_that_match_nothing_are_refused_and_list_what_there_is():
    """A misspelt target would else train nothing."""
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ConfigError, match=r"no linear layer matches 'query'; choose from 0"):
        with_adapters(model, Adapters(2, 4, ("query",)), Cut())
    with pytest.raises(
        ConfigError, match=r"no parameter matches 'head\.\*'; choose from 0\.weight, 0\.bias"
    ):
        with_adapters(model, Adapters(2, 4, ("0",), ("head.*",)), Cut())
    attention = nn.MultiheadAttention(4, 2)
    with pytest.raises(ConfigError, match=r"no linear layer matches 'out_proj'; choose from $"):
        with_adapters(attention, Adapters(2, 4, ("out_proj",)), Cut())
    own = type("Own", (nn.Linear,), {"forward": lambda self, x: 2 * nn.Linear.forward(self, x)})
    with pytest.raises(
        ConfigError, match=r"no linear layer matches '0'; choose from 1$"
    ):  # what it adds would be lost
        with_adapters(nn.Sequential(own(4, 4), nn.Linear(4, 4)), Adapters(2, 4, ("0",)), Cut())
    with pytest.raises(ConfigError, match="both must be positive"):
        Adapters(0, 4, ("0",))


def test_pytorchs_own_encoder_is_judged_with_its_adapters():
    """Its fast path reads the frozen weights alone where nothing is trained, and never calls the
    adapted layers.
    """
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    with_adapters(layer, Adapters(2, 4, ("linear*",), ("norm*",)), Cut())
    assert [name for name, item in layer.named_modules() if isinstance(item, LoraLinear)] == [
        "linear1",
        "linear2",
    ]
    for name in ("linear1", "linear2"):
        nn.init.normal_(layer.get_submodule(name).up)
    x = torch.randn(3, 5, 8)
    trained = layer.train()(x).detach()
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x), trained)


def test_a_frozen_head_cannot_be_a_tiers_own():
    """A tier with labels of its own needs a head that trains."""

    @architecture()
    def frozen_head(cut: Cut, *, input_shape=(6,), classes=3, blocks=2):
        layers = {f"block{number}": nn.Linear(6, 6) for number in range(cut.depth(blocks))}
        head = nn.Linear(6, cut.classes(classes)).requires_grad_(False)
        return nn.Sequential(OrderedDict({**layers, "head": head}))

    layout = infer_layout(frozen_head)
    with pytest.raises(
        PlanError, match=r"head\.weight depends on the labels but is not part of a trainable head"
    ):
        replace(layout, heads={"w1.00-d1": 5})


class Conv1D(nn.Module):
    """In the form of transformers' layer of this name."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


def test_a_layer_with_a_transposed_weight_gets_an_adapter():
    """It computes what it did, and what the adapter adds, once that is not zero."""
    torch.manual_seed(0)
    plain = Conv1D(5, 3)
    x = torch.randn(4, 3)
    adapted_model = with_adapters(
        nn.Sequential(plain), Adapters(rank=2, alpha=4, targets=("0",)), Cut(0.5)
    )
    layer = adapted_model[0]
    torch.testing.assert_close(layer(x), plain(x))
    with torch.no_grad():
        layer.up.fill_(1)
    expected = plain(x) + 2 * (x @ layer.down.T) @ torch.ones(1, 5)
    torch.testing.assert_close(layer(x), expected)
