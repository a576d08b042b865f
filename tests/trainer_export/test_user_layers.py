"""Layers and operators that users bring: each trains in the exported graph as in PyTorch.

Before every one stands a layer with parameters, so that its own gradient with respect to its input
counts.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
from torch import Tensor, nn
from torch.nn import functional

from models.zoo.layers import StaticBatchNorm
from tests.marking import mostly_slow
from tests.trainer_export.helpers import shaken, train_report
from tests.trainer_export.test_user_models import Mean
from trainer_export.formats.onnx import write_train_graph
from trainer_export.model_inputs import Signature
from trainer_export.recipe import Recipe

TOLERANCE = 1e-5
STEMS = {
    1: (lambda: nn.Conv1d(2, 4, 3, padding=1), Signature((2, 10), "float32", 3)),
    2: (lambda: nn.Conv2d(2, 4, 3, padding=1), Signature((2, 9, 8), "float32", 3)),
    3: (lambda: nn.Conv3d(2, 4, 3, padding=1), Signature((2, 4, 6, 4), "float32", 3)),
}


class Do(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def tenths(x: Tensor) -> Tensor:
    """Numbers whose quotients with 0.1 are rounded to whole ones."""
    return torch.round(x.detach() * 10) / 10


class Turned(nn.Module):
    """A spatial transformer that begins with the map as it is, where places lie on pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.eye(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        grid = functional.affine_grid(
            self.theta.expand(x.shape[0], 2, 3), list(x.shape), align_corners=True
        )
        return functional.grid_sample(x, grid, align_corners=True)


class Places(nn.Module):
    """Batch norm of a matrix, in which a sample has many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = StaticBatchNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.reshape(-1, 8)).reshape(x.shape)


class Twice(nn.Module):
    """A layer of two inputs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x.tanh())


def deviation(layer: nn.Module, rank: int = 2) -> float:
    """Of six steps of a network with the layer in its middle."""
    stem, signature = STEMS[rank]
    torch.manual_seed(3)
    body = nn.Sequential(stem(), layer, nn.Tanh())
    with torch.no_grad():
        channels = body(signature.samples(2)).shape[1]
    return train_report(shaken(Mean(body, channels)), signature, sizes=(2, 3)).worst_absolute


def turned(x: Tensor) -> Tensor:
    """A grid of places for a batch of maps, another one for each sample."""
    theta = torch.stack([x.mean((2, 3)), x[:, :, 0, 0]], 1)[..., :3] + torch.eye(2, 3)
    return functional.affine_grid(theta, list(x.shape), align_corners=True)


def apart(x: Tensor) -> Tensor:
    """Nothing just above zero, where the slope of a root makes much of how a processor rounds."""
    return x.masked_fill(x.abs() < 0.05, -1.0)


def normed(x: Tensor) -> Tensor:
    """A layer of its own that is written by hand: its root has an infinite slope where all are
    0.
    """
    return (
        8 * x / ((x * x).sum(3, keepdim=True).sqrt() + 1e-6)
        + 0 * x.pow(2).sum(3, keepdim=True).sqrt()
    )


def triangles(x: Tensor) -> Tensor:
    """The entries below a diagonal, and those above another."""
    below = torch.tril_indices(9, 8, -1)
    above = torch.triu_indices(9, 8, 2)
    return torch.cat([x[:, :, below[0], below[1]], x[:, :, above[0], above[1]]], 2).unsqueeze(2)


RESIZED: Mapping[str, tuple[int, nn.Module]] = {
    "nearest": (2, nn.Upsample(scale_factor=2)),
    "nearest, any size": (2, nn.Upsample(size=(13, 7))),
    "nearest-exact": (2, nn.Upsample(size=(13, 7), mode="nearest-exact")),
    "bilinear": (2, nn.Upsample(scale_factor=2, mode="bilinear")),
    "bilinear, corners": (2, nn.Upsample(size=(13, 17), mode="bilinear", align_corners=True)),
    "bilinear, down": (2, nn.Upsample(size=(4, 5), mode="bilinear")),
    "bicubic": (2, nn.Upsample(scale_factor=2, mode="bicubic")),
    "area": (2, Do(lambda x: functional.interpolate(x, (4, 5), mode="area"))),
    "linear": (1, nn.Upsample(scale_factor=2, mode="linear")),
    "nearest, 1d": (1, nn.Upsample(scale_factor=2)),
    "nearest, 3d": (3, nn.Upsample(scale_factor=2)),
    "trilinear": (3, nn.Upsample(size=(5, 7, 3), mode="trilinear")),
}
TRANSPOSED: Mapping[str, tuple[int, nn.Module]] = {
    "doubling": (2, nn.ConvTranspose2d(4, 5, 2, stride=2)),
    "output padding": (
        2,
        nn.ConvTranspose2d(4, 5, 3, stride=2, padding=1, output_padding=1, bias=False),
    ),
    "output padding of a stride": (
        2,
        nn.ConvTranspose2d(4, 5, 3, stride=2, dilation=3, padding=2, output_padding=2),
    ),
    "dilated": (2, nn.ConvTranspose2d(4, 5, 3, dilation=2)),
    "grouped": (2, nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2)),
    "wide": (2, nn.ConvTranspose2d(4, 40, 3, stride=2, padding=1)),
    "1d": (1, nn.ConvTranspose1d(4, 5, 4, stride=2, padding=1)),
    "3d": (3, nn.ConvTranspose3d(4, 4, 2, 2)),
}
POOLED: Mapping[str, tuple[int, nn.Module]] = {
    "adaptive mean": (2, nn.AdaptiveAvgPool2d(3)),
    "adaptive mean, wider": (2, nn.AdaptiveAvgPool2d(12)),
    "adaptive mean, one axis": (2, nn.AdaptiveAvgPool2d((None, 1))),
    "adaptive mean, 1d": (1, nn.AdaptiveAvgPool1d(3)),
    "adaptive mean, 3d": (3, nn.AdaptiveAvgPool3d(1)),
    "adaptive maximum": (2, nn.AdaptiveMaxPool2d(3)),
    "adaptive maximum, one": (2, nn.AdaptiveMaxPool2d(1)),
    "adaptive maximum, uneven": (2, nn.AdaptiveMaxPool2d((4, 5))),
    "adaptive maximum, 1d": (1, nn.AdaptiveMaxPool1d(3)),
    "overlapping mean": (2, nn.AvgPool2d(3, 1, 1)),
    "mean without padding": (2, nn.AvgPool2d(3, 2, 1, count_include_pad=False)),
    "maximum to the end": (2, nn.MaxPool2d(2, 3, ceil_mode=True)),
    "maximum, no window in the padding": (2, nn.MaxPool2d(2, padding=1, ceil_mode=True)),
    "mean to the end": (2, nn.AvgPool2d(2, ceil_mode=True)),
    "overlapping mean, 1d": (1, nn.AvgPool1d(3, 1, 1)),
    "maximum, 3d": (3, nn.MaxPool3d(2)),
    "overlapping maximum, 3d": (3, nn.MaxPool3d(3, 2, 1)),
    "mean, 3d": (3, nn.AvgPool3d(2)),
    "maxima of maps without channels": (
        2,
        Do(
            lambda x: (
                functional.max_pool2d(x[:, 0], 2)[:, None]
                + functional.max_pool1d(x[:, 1, :4].flatten(1), 2)[:, None, None, :4]
            )
        ),
    ),
    "means of maps without channels": (
        2,
        Do(
            lambda x: (
                functional.avg_pool2d(x[:, 1], 2) + functional.avg_pool2d(x[:, 2], 3, 2, 1)[:, :4]
            ).unsqueeze(1)
        ),
    ),
}
PADDED: Mapping[str, tuple[int, nn.Module]] = {
    "reflected": (2, nn.ReflectionPad2d((1, 2, 1, 0))),
    "replicated": (2, nn.ReplicationPad2d((1, 2, 1, 0))),
    "circular": (2, nn.CircularPad2d((1, 2, 1, 0))),
    "in a convolution": (2, nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")),
    "1d": (1, nn.ReflectionPad1d(2)),
    "without channels": (
        2,
        Do(lambda x: functional.pad(x[:, 0], (1, 1, 1, 0), mode="replicate").unsqueeze(1)),
    ),
}
OTHERS: Mapping[str, tuple[int, nn.Module]] = {
    "gelu by tanh": (2, nn.GELU("tanh")),
    "instance norm": (2, nn.InstanceNorm2d(4, affine=True)),
    "local response norm": (2, nn.LocalResponseNorm(2)),
    "weight norm": (2, nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1))),
    "learnt slope": (2, nn.PReLU()),
    "pixel shuffle": (2, nn.PixelShuffle(2)),
    "repeat": (2, Do(lambda x: x.repeat(1, 1, 2, 2))),
    "repeat into a new dimension": (2, Do(lambda x: x.mean(1).repeat(2, 1, 1, 1).transpose(0, 1))),
    "repeat each": (2, Do(lambda x: x.repeat_interleave(2, 1))),
    "einsum": (2, Do(lambda x: torch.einsum("bchw,bdhw->bcd", x, x))),
    "roll": (2, Do(lambda x: x.roll((1, 2), (2, 3)) * x)),
    "flip": (2, Do(lambda x: x.flip(2) * x)),
    "every second": (2, Do(lambda x: torch.cat([x[..., :8:2, ::2], x[..., 1::2, 1::2]], 1))),
    "places by a list": (2, Do(lambda x: x[:, [0, -1, 1, 1]])),
    "places by two lists": (2, Do(lambda x: x[:, :, [0, 1], [1, -2]] * 2)),
    "places apart": (2, Do(lambda x: x[:, [0, 1], :, [1, 2]].transpose(0, 1))),
    "unfold": (2, Do(lambda x: functional.unfold(x, 3).view(-1, 36, 7, 6))),
    "fold": (2, Do(lambda x: functional.fold(functional.unfold(x, 2), (9, 8), 2))),
    "largest": (2, Do(lambda x: x.max(3)[0] - x.min(3).values)),
    "largest three": (2, Do(lambda x: x.topk(3, 3)[0] * torch.arange(3))),
    "sorted": (2, Do(lambda x: x.sort(3, descending=True)[0] * torch.arange(8))),
    "running sum": (2, Do(lambda x: x.cumsum(2))),
    "angles": (2, Do(lambda x: torch.atan(x) + torch.asinh(x) + x.sinh() + x.cosh())),
    "windows": (2, Do(lambda x: x.unfold(2, 3, 2).flatten(3))),
    "diagonals": (2, Do(lambda x: torch.diagonal(x, 1, 3, 2) * x.diagonal(-1, 2, 3))),
    "diagonal matrices": (
        2,
        Do(lambda x: torch.diag_embed(x[:, :, 0]) + torch.eye(8, dtype=torch.float32)),
    ),
    "distances": (2, Do(lambda x: torch.cdist(x, x[:, :, :3]))),
    "other bases": (
        2,
        Do(lambda x: torch.log2(x.abs() + 1) + torch.log10(x * x + 0.1) + torch.exp2(x)),
    ),
    "remainders": (2, Do(lambda x: x % 0.7 + torch.remainder(x, x.detach().abs() + 1))),
    "quotients with nothing": (
        2,
        Do(lambda x: x * (x * x + 1).detach().div(0.0, rounding_mode="floor").clamp(max=3)),
    ),
    "quotients on a step": (
        2,
        Do(lambda x: x * tenths(x).div(0.1, rounding_mode="floor") + tenths(x) % 0.1),
    ),
    "rests on a step": (
        2,
        Do(lambda x: x * torch.fmod(tenths(x), 0.1) + tenths(x) // -0.1 + x.fmod(tenths(x) + 9)),
    ),
    "norm over places of all samples": (2, Places()),
    "negative whole numbers": (
        2,
        Do(lambda x: x * ((x.detach() * 9).long() // 4) + (x.detach() * 9).long() % -4),
    ),
    "rest of a division towards zero": (
        2,
        Do(lambda x: torch.fmod(x, 0.7) + torch.fmod(x, x.detach().abs() + 1)),
    ),
    "sampled": (
        2,
        Do(lambda x: functional.grid_sample(x, x[:, :2].movedim(1, -1), align_corners=False)),
    ),
    "sampled where it lies": (2, Turned()),
    "norms of at most one": (2, Do(lambda x: torch.renorm(x, 2, 0, 9.0) * x.renorm(1, 1, 40.0))),
    "sampled from corner to corner": (
        2,
        Do(lambda x: functional.grid_sample(x, turned(x), align_corners=True)),
    ),
    "numbers for what is none": (
        2,
        Do(lambda x: x * torch.nan_to_num(x.detach().log(), nan=0.5, neginf=-1.0)),
    ),
    "towards zero": (
        2,
        Do(
            lambda x: (
                x
                + x.frac() * torch.div(x, 0.3, rounding_mode="trunc")
                + torch.hypot(x, x + 3)
                + torch.erfc(x)
            )
        ),
    ),
    "larger that is a number": (
        2,
        Do(lambda x: torch.fmax(x, x.flip(2)) + torch.fmin(x, 0.5 * x).copysign(x.flip(3))),
    ),
    "norms": (
        2,
        Do(
            lambda x: sum(x.norm(order, 3, keepdim=True) for order in (3, 0.5, math.inf, -math.inf))
        ),
    ),
    "triangles": (2, Do(triangles)),
    "root of what is cut off": (
        2,
        Do(lambda x: apart(x).relu().sqrt() + apart(x - 1).relu().sum(3, keepdim=True) ** 0.5),
    ),
    "norm of what is cut off": (
        2,
        Do(lambda x: normed(apart(x - 1).relu()) + normed(functional.threshold(x, 1, 0))),
    ),
    "pooled by a power of what is cut off": (
        2,
        Do(lambda x: functional.lp_pool2d(apart(x - 1).relu(), 2, 2)),
    ),
    "distances of what is cut off": (2, Do(lambda x: torch.acosh(1 + apart(x).relu()))),
    "angles of what is cut off": (2, Do(lambda x: torch.asin(1 - torch.tanh(apart(x).relu())))),
    "entropies of what is cut off": (2, Do(lambda x: torch.special.entr(apart(x).relu()))),
    "taken along": (
        2,
        Do(lambda x: torch.take_along_dim(x, x.argsort(3), 3) * x.take_along_dim(x.argsort(2), 2)),
    ),
    "masks multiplied": (2, Do(lambda x: x * ((x > 0) * (x < 0.5)))),
    "bilinear": (2, Twice(nn.Bilinear(8, 8, 3))),
    "bounded variances": (
        2,
        Do(lambda x: functional.gaussian_nll_loss(x, x.flip(2), x**2, True, 0.1, "none")),
    ),
    "variances of rows": (
        2,
        Do(lambda x: functional.gaussian_nll_loss(x, x.flip(2), x[..., 0] ** 2, reduction="none")),
    ),
    "scattered": (2, Do(lambda x: torch.zeros_like(x).scatter_add(3, x.argsort(3), x * x))),
}
KINDS = [RESIZED, TRANSPOSED, POOLED, PADDED, OTHERS]


@pytest.mark.parametrize(
    ("name", "kind"),
    mostly_slow(
        [(name, kind) for kind in KINDS for name in kind],
        lambda case: [*case[1]].index(case[0]) % 8 == 0,
    ),
    ids=[name for kind in KINDS for name in kind],
)
def test_a_layer(name: str, kind: Mapping[str, tuple[int, nn.Module]]) -> None:
    """Forward and gradient of each, over several steps."""
    rank, layer = kind[name]
    assert deviation(layer, rank) <= TOLERANCE


class Bag(nn.Module):
    """Bags of embeddings, weighted or not, with more tokens than the one-hot product takes."""

    def __init__(self, rows: int, weighted: bool = False, **settings: object) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(rows, 6, **settings)
        self.head = nn.Linear(6, 3)
        self.shares = nn.Parameter(torch.rand(7)) if weighted else None

    def forward(self, tokens: Tensor) -> Tensor:
        shares = None if self.shares is None else self.shares.expand(tokens.shape)
        return self.head(self.bag(tokens, per_sample_weights=shares))


BAGS = [Bag(20, mode="mean"), Bag(150, mode="sum"), Bag(20, mode="max"), Bag(20, padding_idx=0)]


@pytest.mark.parametrize("bag", [*BAGS, Bag(20, weighted=True, mode="sum", padding_idx=1)])
def test_bags_of_embeddings(bag: nn.Module) -> None:
    """Means, sums and maxima over the tokens of a sample, with a padding token that does not
    count.
    """
    assert train_report(bag, Signature((7,), "int64", 3), sizes=(4, 2)).worst_absolute <= TOLERANCE


@pytest.mark.parametrize(
    "chosen", [Do(lambda x: x.flip(1)), Do(lambda x: x.index_select(1, torch.tensor([1, 0])))]
)
def test_channels_that_are_chosen_before_a_matrix(chosen: nn.Module) -> None:
    """They had been taken for the columns of a convolution."""
    module = nn.Sequential(chosen, nn.Flatten(), nn.Linear(12, 3))
    assert (
        train_report(module, Signature((2, 3, 2), "float32", 3), sizes=(4, 2)).worst_absolute
        <= TOLERANCE
    )


def test_one_hot() -> None:
    """Tokens as vectors of zeros and a one."""

    class Hot(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(20, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(functional.one_hot(tokens, 20).float().mean(1))

    assert (
        train_report(Hot(), Signature((7,), "int64", 3), sizes=(4, 2)).worst_absolute <= TOLERANCE
    )


def test_the_last_of_each_sequence() -> None:
    """An index of the batch beside one that the data say."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 5)
            self.head = nn.Linear(5, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            lengths = (tokens != 0).long().sum(1).clamp(min=1)
            return self.head(self.embed(tokens)[torch.arange(tokens.shape[0]), lengths - 1])

    assert (
        train_report(Last(), Signature((7,), "int64", 3), sizes=(4, 2)).worst_absolute <= TOLERANCE
    )


class Fields(nn.Module):
    """One table of all columns, one for the first alone, and a one-hot code of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(3, 5, 4))
        self.first = nn.Embedding(5, 4)
        self.head = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.long()
        found = self.table[torch.arange(3), x].sum(1), self.first(x[:, 0])
        return self.head(
            torch.cat([found[0] * found[1], functional.one_hot(x[:, 1], 5).float()], 1)
        )


@pytest.mark.parametrize(
    "row", [(7, 1, 2), (-1, 1, 2), (1, 7, 2), (1, -1, 2), (1, 2, 9), (1, 2, -6)]
)
def test_what_a_table_has_no_row_for_is_refused(row: Sequence[int]) -> None:
    """As in PyTorch, and in each column: a neighbour's row, the last one and zeros had been
    taken.
    """
    module = Fields()
    signature = Signature((3,), "float32", 3)
    with pytest.raises((IndexError, RuntimeError)):
        module(torch.tensor([row]))
    graph = write_train_graph(module, signature, Recipe())
    session = onnxruntime.InferenceSession(graph.data, providers=["CPUExecutionProvider"])
    given = {f"param.{name}": value.detach().numpy() for name, value in module.named_parameters()}
    given |= {
        name.replace("param", "state", 1): np.zeros_like(value) for name, value in given.items()
    }
    given |= {"y": np.array([1]), "lr": np.array(0.1, np.float32), "mask": np.ones(3, np.float32)}
    wanted = {item.name for item in session.get_inputs()}
    for x, good in ((1, 2, 3), True), (row, False):
        feed = {
            name: value
            for name, value in {**given, "x": np.array([x], np.float32)}.items()
            if name in wanted
        }
        with (
            contextlib.nullcontext()
            if good
            else pytest.raises(InvalidArgument, match="out of data bounds")
        ):
            session.run(["loss"], feed)


def frozen(*names: str) -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


@pytest.mark.parametrize("names", [("0.weight", "0.bias"), ("2.weight",)])
def test_frozen_parameters_stay(names: Sequence[str]) -> None:
    """A parameter that wants no gradient is neither moved nor decayed, and the others move as in
    PyTorch.
    """
    assert train_report(frozen(*names), Signature((6,), "float32", 3)).worst_absolute <= TOLERANCE


def test_a_layer_norm_is_given_what_is_centred() -> None:
    """Runtimes before 1.31, which boards have, take a variance of raw squares: a mean of 293 beside
    0.3 made it nan.
    """
    module = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 3))
    signature = Signature((16,), "float32", 3)
    graph = onnx.load_model_from_string(write_train_graph(module, signature, Recipe()).data).graph
    (norm,) = (node for node in graph.node if node.op_type == "LayerNormalization")
    made = {name: node for node in graph.node for name in node.output}
    assert made[norm.input[0]].op_type == "Sub"
    assert made[made[norm.input[0]].input[1]].op_type == "ReduceMean"
