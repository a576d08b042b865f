"""Converted layers have the attributes, the signature and the forward of what they replace."""

import copy
import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fleet_protocol.errors import ConfigError
from models import Cut, architecture, infer_layout
from models.architecture import build
from models.zoo.conversion import convert
from models.zoo.conversion_plan import convert_where_needed
from models.zoo.layers import StaticBatchNorm, set_mode
from models.zoo.noise_inputs import noise_shapes
from models.zoo.single_output import single_output
from tests.trainer_export.helpers import shaken, train_report
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.loss import loss_named
from trainer_export.model_inputs import Signature
from trainer_export.recipe import Recipe


@pytest.mark.parametrize(
    "layer",
    [
        nn.Dropout(0.3),
        nn.Dropout2d(0.2, inplace=True),
        nn.BatchNorm2d(4, momentum=0.2),
        nn.MultiheadAttention(8, 2, batch_first=True),
        nn.GRU(3, 4, 2, dropout=0.1, batch_first=True),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_attributes_are_those_of_the_replaced_layer(layer):
    """All plain ones, but for the dropout of attention, which is a layer."""
    made, _ = convert(copy.deepcopy(layer))
    assert type(made) is not type(layer)
    for name, value in vars(layer).items():
        if isinstance(value, (bool, int, float, str, type(None))) and name != "dropout":
            assert getattr(made, name) == value, name


def test_arguments_are_called_as_those_of_the_replaced_layer():
    x = torch.randn(2, 4, 3)
    assert convert(nn.Dropout(0.3))[0].eval()(input=x) is x
    assert convert(nn.BatchNorm1d(4))[0](input=x).shape == x.shape
    gru = nn.GRU(3, 5, 2, dropout=0.1, batch_first=True).eval()
    start = torch.randn(2, 2, 5)
    expected = gru(input=x, hx=start)
    made = convert(gru)[0].eval()
    made.flatten_parameters()
    torch.testing.assert_close(made(input=x, hx=start), expected)


class NormAct(nn.BatchNorm2d):
    """Normalises and activates, as timm's layer does."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.LeakyReLU(0.2, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        is_training = self.training
        if is_training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        normal = functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, is_training, 0.1
        )
        return self.act(normal)


class OwnNumbers(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return x - self.running_mean.view(1, -1, 1, 1)


def net(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.Flatten(), nn.Linear(64, 3))


def test_a_norm_with_a_forward_of_its_own_keeps_it():
    """In evaluation and in training, with the statistics of the batch, and in a graph."""
    torch.manual_seed(3)
    module = shaken(net(NormAct(4)))
    module[1].running_mean.uniform_(-1, 1)
    x = torch.randn(5, 2, 6, 6)
    expected = copy.deepcopy(module).eval()(x)
    expected_in_training = copy.deepcopy(module).train()(x)
    made, replaced = convert(module)
    assert [entry.old for entry in replaced] == ["NormAct", "LeakyReLU(inplace=True)"]
    assert isinstance(made[1], StaticBatchNorm)
    assert isinstance(made[1], NormAct)
    torch.testing.assert_close(set_mode(made, "eval")(x), expected)
    torch.testing.assert_close(set_mode(made, "train")(x), expected_in_training)
    assert convert(made)[1] == ()
    report = train_report(made, Signature((2, 6, 6), "float32", 3), sizes=(5, 4))
    assert report.worst_absolute <= 1e-5


def test_a_norm_that_does_not_call_the_function_is_refused_when_it_runs():
    made, _ = convert(net(OwnNumbers(4)))
    with pytest.raises(ConfigError, match=r"OwnNumbers has its own forward.*BatchNorm in a module"):
        made(torch.randn(5, 2, 6, 6))


class Attending(nn.Module):
    """Attention whose dropout has no layer: a rate for a function, as in many packages."""

    def __init__(self, dim: int, classes: int, fused: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 3 * dim)
        self.head = nn.Linear(dim, classes)
        self.fused = fused

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x).chunk(3, -1)
        rate = 0.4 if self.training else 0.0
        if self.fused:
            mixed = functional.scaled_dot_product_attention(
                q[:, None], k[:, None], v[:, None], dropout_p=rate, is_causal=True
            )[:, 0]
        else:
            shares = (q @ k.transpose(1, 2)).softmax(-1)
            mixed = functional.dropout(shares, rate, self.training) @ v
        return OrderedDict(logits=self.head(mixed.mean(1)), cache=object())


@architecture()
def attending(
    cut: Cut, *, input_shape: tuple[int, ...] = (5, 4), classes: int = 3, fused: bool = False
) -> nn.Module:
    return Attending(cut.width("dim", 8), cut.classes(classes), fused)


@pytest.mark.parametrize("fused", [False, True])
def test_dropout_by_functions_and_one_output_in_an_object_export(fused, tmp_path):
    """The random numbers are an input; nothing else of the object counts."""
    settings = {"fused": fused}
    kept, replaced = convert_where_needed(attending, settings)
    assert [entry.old for entry in replaced] == ["dropout by functions"]
    model = build(kept, 0.5, settings=settings).train()
    assert noise_shapes(model, torch.randn(2, 5, 4)) == {
        "functional_dropout": (1, 5, 5) if fused else (5, 5)
    }
    tiers = [infer_layout(kept, settings).tier(width) for width in (1.0, 0.5)]
    reports = export_architecture(
        ExportRequest(kept, settings, tiers, Recipe()), tmp_path, ExportOptions(formats=("onnx",))
    )
    assert all(report.worst_deviation < 1e-4 for report in reports)


def test_dropout_in_attention_has_the_mean_of_attention_without():
    """Masks, scales and grouped heads as in PyTorch's function."""
    torch.manual_seed(0)
    made = build(convert_where_needed(attending, {"fused": True})[0], settings={"fused": True})
    layer = made.functional_dropout
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    masks = [None, torch.rand(5, 5) > 0.3, torch.randn(5, 5)]
    masks[1].fill_diagonal_(True)
    layer.train()
    for mask in masks:
        options = {"attn_mask": mask, "scale": 0.3, "enable_gqa": True}
        expected = functional.scaled_dot_product_attention(q, k, v, **options)
        made.train()
        layer.drop = lambda x, rate, leading=None: x
        layer._begin(made, None)
        found = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.2, **options)
        layer._end()
        torch.testing.assert_close(found, expected)


class Pair(NamedTuple):
    logits: Tensor
    loss: Tensor | None = None


@dataclasses.dataclass
class Returned:
    logits: Tensor
    steps: int = 3


def test_one_tensor_of_an_object_is_the_output():
    """Beside None, numbers, whole-number tensors and objects without tensors."""
    x = torch.ones(2)
    ids = torch.ones(2, dtype=torch.int64)
    for returned in ({"a": x, "b": None}, (x,), [x, ids], Pair(x), Returned(x)):
        assert single_output(returned) is x
    for returned in ({"a": x, "b": x}, (), {"a": x, "hidden": (x, x)}, Pair(x, x), None, x):
        assert single_output(returned) is None


class Forecast(nn.Module):
    """One number for each sample, without a dimension of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[:, 0]


@architecture()
def forecast(cut: Cut, *, input_shape: tuple[int, ...] = (6,), width: int = 8) -> nn.Module:
    return Forecast(cut.width("width", width))


def test_a_loss_of_numbers_needs_no_classes_nor_their_dimension(tmp_path):
    tiers = [infer_layout(forecast).tier(width) for width in (1.0, 0.5)]
    recipe = Recipe(loss=loss_named("mean-squared-error"))
    reports = export_architecture(
        ExportRequest(forecast, None, tiers, recipe), tmp_path, ExportOptions(formats=("onnx",))
    )
    assert all(report.worst_deviation < 1e-4 for report in reports)
