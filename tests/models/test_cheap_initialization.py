"""Initial weights that a proof needs are drawn cheaply, and have the size that a model asks for."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import Cut, architecture, infer_layout
from models.zoo.builds import CheapInitialization


class Tied(nn.Module):
    """Tokens whose embedding is the last layer, too, so a proof needs the initial weights."""

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.mix(self.embed(x))))
        return logits


@architecture(input_dtype="int64")
def tied(cut: Cut, *, input_shape: tuple[int, ...] = (4,), classes: int = 20) -> nn.Module:
    del input_shape
    return Tied(cut.width("width", 8), cut.classes(classes))


def test_weights_are_as_large_as_asked_for() -> None:
    """A model that computes with larger ones than usual may saturate."""
    before = torch.get_rng_state()
    with CheapInitialization():
        weight = nn.init.normal_(nn.Parameter(torch.empty(300, 400)), 2.0, std=0.1)
        drawn = nn.init.ones_(nn.Parameter(torch.empty(3)))
    values = weight.detach()
    assert abs(float(values.mean()) - 2.0) < 0.01
    assert abs(float(values.std()) - 0.1) < 0.01
    assert weight.requires_grad
    assert drawn.eq(1).all()
    assert torch.equal(before, torch.get_rng_state())


def test_a_proof_draws_no_normal_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """To draw those of a large vocabulary takes most of the time of a build."""
    drawn: list[Tensor] = []
    draw: Any = nn.init._no_grad_normal_

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not tensor.is_meta:
            drawn.append(tensor)
        result: Tensor = draw(tensor, *args, **kwargs)
        return result

    monkeypatch.setattr(nn.init, "_no_grad_normal_", counted)
    layout = infer_layout(tied)
    assert layout.axes["width"].size == 8
    assert drawn == []
