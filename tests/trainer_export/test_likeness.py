"""A tier that is another model than the whole one is refused, with what makes it one."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fleet_protocol.errors import ExportError
from models import Cut, architecture
from models.registry import infer_layout
from models.tier import Tier
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.exported import Export
from trainer_export.recipe import Recipe


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, *, kept: bool, projected: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)
        self.kept = kept
        self.projection = nn.Linear(inputs, outputs) if projected else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.kept:
            y = y + x
        return torch.tanh(y if self.projection is None else y + self.projection(x))


def _model(cut: Cut, kind: str, classes: int) -> nn.Module:
    if kind == "stride":
        count = cut.width("first", 8)
        outputs = cut.width("second", 12)
        inner = nn.Conv1d(count, outputs, 1, 1 if count == 1 else 2)
        parts = nn.Conv1d(1, count, 1), inner, nn.AdaptiveAvgPool1d(1), nn.Flatten()
        return nn.Sequential(
            nn.Unflatten(1, (1, 5)), *parts, nn.Linear(outputs, cut.classes(classes))
        )
    first = cut.width("first", 8)
    second = cut.width("second", 12)
    alike = (
        cut.axes["first"].size == cut.axes["second"].size
        if kind == "sizes of the whole"
        else first == second
    )
    block = Block(
        first,
        second,
        kept=alike and kind != "projection",
        projected=kind == "projection" and not alike,
    )
    return nn.Sequential(nn.Linear(5, first), block, nn.Linear(second, cut.classes(classes)))


@architecture()
def shortcut(
    cut: Cut, *, input_shape: tuple[int, ...] = (5,), classes: int = 3, kind: str = "shortcut"
) -> nn.Module:
    return _model(cut, kind, classes)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "shortcut",
            (
                r"w0\.0625-d1: module 1 \(Block\), line \d+ of test_likeness\.py calls add in this "
                r"tier, but not in the whole model"
            ),
        ),
        (
            "stride",
            (
                r"w0\.0625-d1: module 2 .*calls conv1d with stride, padding and dilation \(\(1,\), .* "
                r"not in the whole model"
            ),
        ),
        (
            "projection",
            r"w0\.0625-d1: parameter 1\.projection\.weight is missing and should be \(1, 1\)",
        ),
    ],
)
def test_a_tier_that_is_another_model(kind: str, message: str, tmp_path: Path) -> None:
    """Both layers have one unit there, and 8 and 12 in the whole model."""
    with pytest.raises(ExportError, match=message + r".*cut\.axes\[name\]\.size"):
        export_architecture(
            ExportRequest(shortcut, {"kind": kind}, [Tier(1 / 16, 1)], Recipe()),
            tmp_path,
            ExportOptions(formats=("onnx",)),
        )


def test_the_whole_model_is_asked_once() -> None:
    """What it calls is kept for all tiers of its depth, and each of them is compared with it."""
    export = Export(shortcut, infer_layout(shortcut), Recipe())
    for width in (0.5, 0.25):
        export.module(Tier(width, 1))
    assert list(export.whole) == [(1, 3)]
    with pytest.raises(ExportError, match="calls add in this tier, but not in the whole model"):
        export.module(Tier(1 / 16, 1))


def test_deciding_by_the_whole_sizes(tmp_path: Path) -> None:
    """What the refusal advises is exported."""
    settings = {"kind": "sizes of the whole"}
    assert export_architecture(
        ExportRequest(shortcut, settings, [Tier(1 / 16, 1)], Recipe()),
        tmp_path,
        ExportOptions(formats=("onnx",)),
    )


class SharedKeys(nn.Module):
    """Copies its keys for the query heads that share them, unless there is one for each."""

    def __init__(self, heads: int, classes: int) -> None:
        super().__init__()
        self.copies = heads // 2
        self.query = nn.Linear(4, heads * 3)
        self.key = nn.Linear(4, 2 * 3)
        self.head = nn.Linear(heads, classes)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(1, (-1, 3))
        key = self.key(x).unflatten(1, (-1, 3))
        if self.copies > 1:
            key = key[:, :, None].expand(len(x), 2, self.copies, 3).reshape(len(x), -1, 3)
        logits: Tensor = self.head((query * key).sum(2).tanh())
        return logits


@architecture()
def shared_keys(cut: Cut, *, input_shape: tuple[int, ...] = (4,), classes: int = 3) -> nn.Module:
    """Query heads that are cut inside the two groups that share a key head."""
    return SharedKeys(2 * cut.heads("query", 2, 4), cut.classes(classes))


def test_a_tier_may_leave_out_copies_of_one() -> None:
    """A function that only gives a tensor another shape is no difference of models."""
    export = Export(shared_keys, infer_layout(shared_keys), Recipe())
    assert export.module(Tier(0.25, 1)).get_submodule("query").weight.shape == (6, 4)


class Features(nn.Module):
    """Random features of the inputs, as a buffer, as what nobody knows of, or as a parameter that
    is not trained.
    """

    def __init__(self, hidden: int, classes: int, kind: str) -> None:
        super().__init__()
        drawn = torch.randn(5, 4)
        if kind == "buffer":
            self.register_buffer("drawn", drawn)
        else:
            self.drawn = nn.Parameter(drawn, requires_grad=False) if kind == "parameter" else drawn
        self.layer = nn.Linear(4, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.layer(x @ self.drawn)))
        return out


@architecture()
def features(
    cut: Cut, *, input_shape: tuple[int, ...] = (5,), classes: int = 3, kind: str = "buffer"
) -> nn.Module:
    return Features(cut.width("hidden", 4), cut.classes(classes), kind)


@pytest.mark.parametrize(
    ("kind", "named"),
    [("buffer", "buffer drawn"), ("attribute", "a tensor that is not a parameter")],
)
def test_what_is_drawn_when_a_tier_is_built(kind: str, named: str, tmp_path: Path) -> None:
    """Each tier would have random features of its own, so that its weights are no part of the whole
    model's.
    """
    with pytest.raises(
        ExportError, match=rf"w0\.50-d1: a second instance .*: {named} is drawn at random"
    ):
        export_architecture(
            ExportRequest(features, {"kind": kind}, [Tier(0.5, 1)], Recipe()),
            tmp_path,
            ExportOptions(formats=("onnx",)),
        )


def test_drawn_features_as_a_frozen_parameter(tmp_path: Path) -> None:
    """What the refusal advises is exported."""
    assert export_architecture(
        ExportRequest(features, {"kind": "parameter"}, [Tier(0.5, 1)], Recipe()),
        tmp_path,
        ExportOptions(formats=("onnx",)),
    )
