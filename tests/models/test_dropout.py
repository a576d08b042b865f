"""Layers that need noise: exact for noise that is fed, of the right statistics without, and off in
evaluation.
"""

import pytest
import torch
from torch import nn

from fleet_protocol.errors import ConfigError, ExportError
from models import Registry, build
from models.zoo.dropout import Dropout, TokenMask
from models.zoo.layers import set_mode
from models.zoo.noise_inputs import feed_noise, noise_layers, noise_shapes

ZOO = Registry.zoo()
SMALL = {"classes": 19, "embed": 16, "heads": 2, "ffn": 20, "blocks": 2, "input_shape": (7,)}


def test_dropout_keeps_what_its_noise_says():
    """Entries whose noise is at least the rate stay, scaled by 1 / (1 - rate); so do their
    gradients.
    """
    layer = Dropout(0.25)
    x = torch.tensor([[1.0, 2.0, 3.0, -4.0]], requires_grad=True)
    feed_noise(layer, {"": torch.tensor([[0.0, 0.2499, 0.25, 0.9]])})
    out = layer(x)
    torch.testing.assert_close(out, torch.tensor([[0.0, 0.0, 4.0, -16.0 / 3]]))
    out.sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([[0.0, 0.0, 4.0 / 3, 4.0 / 3]]))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_drops_its_share_and_keeps_the_mean(rate):
    """Of many ones: the share of zeros, the mean and independence of neighbours, within 5 standard
    errors.
    """
    torch.manual_seed(0)
    n = 200_000
    out = Dropout(rate)(torch.ones(n))
    kept = (out > 0).double()
    error = (rate * (1 - rate) / n) ** 0.5
    assert abs(kept.mean().item() - (1 - rate)) < 5 * error
    assert abs(out.double().mean().item() - 1) < 5 * error / (1 - rate)
    torch.testing.assert_close(out[out > 0], torch.full_like(out[out > 0], 1 / (1 - rate)))
    pairs = (kept[1:] * kept[:-1]).mean().item()
    assert abs(pairs - (1 - rate) ** 2) < 5 / n**0.5


def test_tokens_are_masked_where_the_noise_is_low():
    """Tokens whose noise is below the rate become the mask symbol; the input is left alone."""
    layer = TokenMask(0.15, symbol=9)
    tokens = torch.tensor([[1, 2, 3]])
    feed_noise(layer, {"": torch.tensor([[0.1, 0.15, 0.8]])})
    assert layer(tokens).tolist() == [[9, 2, 3]]
    assert tokens.tolist() == [[1, 2, 3]]
    feed_noise(layer, {})
    torch.manual_seed(0)
    share = (layer(torch.zeros(100_000, dtype=torch.int64)) == 9).double().mean().item()
    assert abs(share - 0.15) < 0.006


@pytest.mark.parametrize("mode", ["eval", "statistics"])
def test_nothing_is_random_outside_training(mode):
    """In evaluation a model has no layer that needs noise, and two passes agree."""
    model = set_mode(build(ZOO.get("transformer_mlm"), settings=SMALL), mode)
    x = torch.randint(0, 19, (2, 7))
    assert noise_layers(model) == {}
    assert noise_shapes(model, x) == {}
    assert torch.equal(model(x), model(x))


def test_a_rate_of_zero_needs_no_noise():
    """A layer that drops nothing leaves no trace in a graph."""
    model = set_mode(build(ZOO.get("next_word"), settings={**SMALL, "dropout": 0.0}), "train")
    assert noise_layers(model) == {}


@pytest.mark.parametrize(("width", "embed", "ffn"), [(1.0, 16, 20), (0.3, 5, 6)])
def test_fed_noise_decides_a_training_step(width, embed, ffn):
    """The shapes name every random layer, narrow ones too; equal noise gives equal logits, other
    noise others.
    """
    model = set_mode(build(ZOO.get("transformer_mlm"), width, settings=SMALL), "train")
    x = torch.randint(0, 19, (3, 7))
    state = torch.get_rng_state()
    shapes = noise_shapes(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    one = {"dropout1": (7, embed), "dropout2": (7, ffn), "dropout3": (7, embed)}
    assert shapes == {
        "mask": (7,),
        "dropout": (7, embed),
        **{f"blocks.{block}.{name}": shape for block in (0, 1) for name, shape in one.items()},
    }

    def logits(seed):
        generator = torch.Generator().manual_seed(seed)
        feed_noise(
            model,
            {name: torch.rand(3, *shape, generator=generator) for name, shape in shapes.items()},
        )
        with torch.no_grad():
            return model(x)

    first = logits(1)
    assert torch.equal(logits(1), first)
    assert not torch.equal(logits(2), first)
    feed_noise(model, {})
    assert all(layer.noise is None for layer in noise_layers(model).values())


class Twice(nn.Module):
    """One layer on words, on windows of them with the words first, and another that is never
    called.
    """

    def __init__(self):
        super().__init__()
        self.dropout = Dropout(0.5)
        self.idle = Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.dropout(x).reshape(-1, 2, 3).transpose(0, 1))


def test_a_random_layer_used_twice_takes_its_noise_in_a_row():
    """Each use has numbers of its own, wherever the batch is, and one that is never called needs
    none.
    """
    model = Twice()
    x = torch.ones(2, 4, 3)
    assert noise_shapes(model, x) == {"dropout": (24,)}
    noise = torch.rand(2, 24)
    for _ in range(2):
        feed_noise(model, {"dropout": noise})
        first = x * 2 * (noise[:, :12].reshape(2, 4, 3) >= 0.5)
        kept = noise[:, 12:].reshape(2, 4, 3) >= 0.5
        assert torch.equal(model(x), first.reshape(-1, 2, 3).transpose(0, 1) * 2 * kept)
    with pytest.raises(RuntimeError, match="shape"):
        model(x)


def test_noise_that_no_sample_has_is_refused():
    """Of a tensor without a batch there is no share for each sample; nor has a layer noise that is
    not there.
    """

    class Places(Twice):
        def forward(self, x):
            return x + self.dropout(torch.ones(4, 3))

    with pytest.raises(
        ExportError, match=r"dropout draws noise for .* which is not divisible among the samples"
    ):
        noise_shapes(Places(), torch.ones(2, 4, 3))
    with pytest.raises(ExportError, match="no noise layer 'drop'; its noise layers are dropout"):
        feed_noise(Twice(), {"drop": torch.ones(1)})


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_impossible_rates_are_refused(rate):
    """Dropping everything leaves nothing to scale up."""
    with pytest.raises(ConfigError, match=r"\[0, 1\)"):
        Dropout(rate)


def test_a_layer_that_is_used_now_and_then_is_refused() -> None:
    """Such as in a block that a model leaves out at random."""

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = Dropout(0.5)
            self.runs = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.runs += 1
            return self.dropout(x.T) if self.runs % 2 else x.T

    with pytest.raises(ExportError, match="uses layer dropout for some batches only"):
        noise_shapes(Skipping().train(), torch.ones(2, 3))
