"""A head that no loss depends on is refused with a remedy, and each remedy is taken."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fleet_protocol.errors import ExportError, ShoalError
from models import Architecture, Cut, Tier, architecture
from shoal import loss
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.formats import onnx as portable
from trainer_export.recipe import Recipe


class Reached(ShoalError):
    """What follows is no business of this file."""


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """An export ends where its graphs would be traced."""

    def stop(*_: Any) -> None:
        raise Reached

    monkeypatch.setattr(portable, "write_graphs", stop)


class Net(nn.Module):
    """A body, and heads that are used or not."""

    def __init__(self, hidden: int, classes: int, forward: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.body = nn.Linear(4, hidden)
        self.first = nn.Linear(hidden, classes)
        self.second = nn.Linear(hidden, classes)
        self.run = forward

    def forward(self, x: Tensor) -> Any:
        return self.run(self, self.body(x).relu())


def model(
    forward: Callable[[Any, Tensor], Any], change: Callable[[Any], Any] = lambda net: None
) -> Architecture:
    @architecture()
    def heads(cut: Cut, *, input_shape: tuple[int, ...] = (4,), classes: int = 3) -> nn.Module:
        net = Net(cut.width("hidden", 6), cut.classes(classes), forward)
        change(net)
        return net

    return heads


def one(net: Any, x: Tensor) -> Tensor:
    out: Tensor = net.first(x)
    return out


def both(net: Any, x: Tensor) -> dict[str, Tensor]:
    return {"first": net.first(x), "second": net.second(x)}


@loss("int64")
def of_one(outputs: Any, targets: Tensor) -> Tensor:
    """Looks at the first head."""
    return functional.cross_entropy(outputs["first"], targets, reduction="none")


@loss("int64")
def of_both(outputs: Any, targets: Tensor) -> Tensor:
    """Looks at both."""
    return sum(
        functional.cross_entropy(outputs[name], targets, reduction="none")
        for name in ("first", "second")
    )


@loss("int64")
def of_pieces(outputs: Any, targets: Tensor) -> Tensor:
    """Looks at the first of the pieces of one layer."""
    return functional.cross_entropy(outputs[0], targets, reduction="none")


def export(arch: Architecture, recipe: Recipe, folder: Path) -> None:
    export_architecture(
        ExportRequest(arch, None, [Tier(0.5, 1)], recipe), folder, ExportOptions(formats=("onnx",))
    )


@pytest.mark.slow
def test_a_head_that_is_never_called_is_refused(tmp_path: Path) -> None:
    """And used or deleted it is not, nor one that is frozen."""
    with pytest.raises(
        ExportError,
        match=r"does not depend on second\.weight.*use that head in the loss, or remove it",
    ):
        export(model(one), Recipe(), tmp_path)
    used = model(lambda net, x: net.first(x) + net.second(x))
    deleted = model(one, lambda net: delattr(net, "second"))
    frozen = model(one, lambda net: net.second.requires_grad_(False))
    for arch in (used, deleted, frozen):
        with pytest.raises(Reached):
            export(arch, Recipe(), tmp_path)


@pytest.mark.slow
def test_an_output_that_no_loss_depends_on_is_refused(tmp_path: Path) -> None:
    """And read or left out it is not; pieces of one layer are told apart."""
    with pytest.raises(
        ExportError,
        match=r"of_one does not depend on logits\.second.*use that head in the loss, or remove it",
    ):
        export(model(both), Recipe(loss=of_one()), tmp_path)
    with pytest.raises(ExportError, match=r"of_pieces does not depend on logits\.1,"):
        export(
            model(lambda net, x: torch.cat([net.first(x), net.second(x)], 1).split(3, 1)),
            Recipe(loss=of_pieces()),
            tmp_path,
        )
    single = model(lambda net, x: {"first": net.first(x)}, lambda net: delattr(net, "second"))
    for arch, chosen in ((model(both), of_both), (single, of_one)):
        with pytest.raises(Reached):
            export(arch, Recipe(loss=chosen()), tmp_path)


@pytest.mark.slow
def test_heads_in_training_alone_are_refused(tmp_path: Path) -> None:
    """In both modes, under a loss of one's own, they are not."""
    with pytest.raises(
        ExportError, match=r"returns a dict in training, but one tensor.*the same heads in both"
    ):
        export(
            model(lambda net, x: both(net, x) if net.training else net.first(x)), Recipe(), tmp_path
        )
    with pytest.raises(Reached):
        export(model(both), Recipe(loss=of_both()), tmp_path)
