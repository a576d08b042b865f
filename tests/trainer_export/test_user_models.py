"""Models nobody at Shoal wrote: layers in other shapes and combinations than the zoo's."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from models.zoo.layers import StaticBatchNorm
from tests.marking import mostly_slow
from tests.trainer_export.helpers import shaken, train_report
from trainer_export.model_inputs import Signature

IMAGE = Signature((2, 9, 8), "float32", 3)
VECTOR = Signature((12,), "float32", 3)
TOKENS = Signature((7,), "int64", 3)


class Mean(nn.Module):
    """Mean over the positions, then a linear classifier."""

    def __init__(self, body: nn.Module, channels: int) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return self.head(x.mean(tuple(range(2, x.dim()))))


class Residual(nn.Module):
    """A pre-activation residual block with a strided shortcut, as in specification 1.7."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = StaticBatchNorm(2)
        self.norm2 = StaticBatchNorm(4)
        self.conv1 = nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(2, 4, 1, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        o = torch.relu(self.norm1(x))
        return self.conv2(torch.relu(self.norm2(self.conv1(o)))) + self.shortcut(o)


class Written(nn.Module):
    """Writes into parts of a copy of its map, steps between them too."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y += 1
        y[:, :, 0] = 0
        y[:, :, 1:3] *= 2
        y[:, :, 2, ::2] = x[:, :, 0, ::2]
        return y


class Counted(nn.Module):
    """Places, products, angles and middles of what it gets, and numbers where a mask is true."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y[y < 0.1] = 0.2
        y[(y.sum(3) > 2) & (y.amin(3) > -1)] = -0.3
        least = x.flatten(2).argmin(2).to(x.dtype)[..., None, None]
        angle = torch.atan2(x, y.flip(3)) + torch.atan2(torch.zeros_like(x), torch.sign(x))
        return (
            y * least
            + angle
            + x.cumprod(3)
            + y.prod(2, keepdim=True)
            - x.median(3, keepdim=True)[0]
        )


class Selfish(nn.Module):
    """Attention through PyTorch's own fused function, with a large vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(150, 8, padding_idx=0)
        self.project = nn.Linear(8, 24)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = (
            self.project(self.embed(tokens))
            .unflatten(-1, (3, 2, 4))
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.head(mixed.transpose(1, 2).flatten(2).amax(1))


class Patchwork(nn.Module):
    """Slices, joins, padding, selections, comparisons and reductions in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(6))
        self.head = nn.Linear(14, 3)

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, 1)
        even = x[:, ::2] * self.scale
        both = torch.cat([left * torch.sigmoid(right), functional.pad(even[:, 1:], (1, 0))], 1)
        gated = torch.where(both > 0, both, both.exp() - 1).clamp(-2, 2)
        extra = torch.stack([gated[:, 3], (gated**2).sum(1).sqrt()], 1)
        return self.head(torch.cat([gated, extra / (1 + extra.abs())], 1).tanh())


def _averages() -> nn.Sequential:
    return nn.Sequential(
        nn.AvgPool2d(2, ceil_mode=True, divisor_override=3),
        nn.AvgPool2d(3, 1, 1, count_include_pad=False),
        nn.AvgPool2d((2, 3), 1, (1, 0), divisor_override=5),
        nn.AvgPool2d(2, divisor_override=3),
    )


IMAGE_BODIES: dict[str, Callable[[], nn.Module]] = {
    "strided": lambda: Mean(
        nn.Sequential(nn.Conv2d(2, 5, 3, stride=2), nn.ReLU(), nn.Conv2d(5, 4, 2)), 4
    ),
    "dilated": lambda: Mean(nn.Sequential(nn.Conv2d(2, 6, 3, padding=2, dilation=2), nn.SiLU()), 6),
    "grouped": lambda: Mean(
        nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 12, 3, groups=3)), 12
    ),
    "depthwise": lambda: Mean(
        nn.Sequential(nn.Conv2d(2, 2, 3, groups=2), nn.Conv2d(2, 5, 1), nn.GELU()), 5
    ),
    "uneven kernel": lambda: Mean(
        nn.Sequential(nn.Conv2d(2, 4, (1, 3), padding=(0, 1)), nn.Tanh()), 4
    ),
    "overlapping max-pool": lambda: Mean(
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.MaxPool2d(3, 2, 1)), 4
    ),
    "max-pool of three": lambda: Mean(
        nn.Sequential(nn.Conv2d(2, 4, 1), nn.ReLU(), nn.MaxPool2d((3, 2))), 4
    ),
    "average pool": lambda: Mean(
        nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.AvgPool2d(2), nn.Softplus()), 4
    ),
    "padded average pool": lambda: Mean(nn.Sequential(nn.Conv2d(2, 4, 1), _averages()), 4),
    "counted": lambda: Mean(nn.Sequential(nn.Conv2d(2, 4, 1), Counted()), 4),
    "group norm": lambda: Mean(nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ELU()), 4),
    "leaky": lambda: Mean(nn.Sequential(nn.Conv2d(2, 4, 3), nn.LeakyReLU(0.2), nn.Hardswish()), 4),
    "in place": lambda: Mean(
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True), nn.Hardtanh()), 4
    ),
    "residual": lambda: Mean(Residual(), 4),
    "written": lambda: Mean(nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), Written()), 4),
    "wide": lambda: Mean(
        nn.Sequential(
            nn.Conv2d(2, 40, 3, padding=1),
            StaticBatchNorm(40),
            nn.ReLU(),
            nn.Conv2d(40, 48, 3, padding=1),
        ),
        48,
    ),
}


@pytest.mark.parametrize(
    "name", mostly_slow(IMAGE_BODIES, lambda name: [*IMAGE_BODIES].index(name) % 3 == 0)
)
def test_convolutional_models(name: str) -> None:
    """Convolutions of every kind, pooling with odd sides and other norms train as in PyTorch."""
    torch.manual_seed(3)
    assert train_report(shaken(IMAGE_BODIES[name]()), IMAGE).worst_absolute <= 1e-5


def test_convolution_over_time() -> None:
    """One spatial dimension works like two."""
    torch.manual_seed(3)
    module = Mean(
        nn.Sequential(nn.Conv1d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 4, 2, stride=2)), 4
    )
    assert train_report(module, Signature((3, 10), "float32", 3)).worst_absolute <= 1e-5


def test_fused_attention_and_embedding() -> None:
    """Scaled dot product attention, repeated tokens and a padding row train as in PyTorch."""
    torch.manual_seed(3)
    assert train_report(Selfish(), TOKENS, sizes=(6, 2)).worst_absolute <= 1e-5


def test_slices_joins_and_comparisons() -> None:
    """A model of views, joins, padding, where and clamp trains as in PyTorch."""
    torch.manual_seed(3)
    assert train_report(Patchwork(), VECTOR).worst_absolute <= 1e-5


def test_an_unused_parameter_is_left_alone() -> None:
    """A parameter the loss does not depend on stays as it is, as with PyTorch's SGD."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(12, 3))
    module.register_parameter("idle", nn.Parameter(torch.ones(4)))
    assert train_report(module, VECTOR).worst_absolute <= 1e-5


class Branches(nn.Module):
    """Convolutions of the same input, each with a mean and a classifier; the outputs are summed."""

    def __init__(self, channels: int, geometries: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.entry = nn.Conv2d(2, channels, 1)
        self.branches = nn.ModuleList()
        for outputs, *geometry in geometries:
            self.branches.append(Mean(nn.Conv2d(channels, outputs, *geometry), outputs))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.entry(x))
        return torch.stack([branch(x) for branch in self.branches]).sum(0)


# Three in a model, since most of the time goes into the export of a model.
@settings(max_examples=4, deadline=None)
@given(
    channels=st.integers(1, 5),
    geometries=st.lists(
        st.tuples(
            st.integers(1, 5),  # output channels
            st.integers(1, 4),  # kernel
            st.integers(1, 3),  # stride
            st.integers(0, 2),  # padding
            st.integers(1, 2),  # dilation
        ),
        min_size=3,
        max_size=3,
    ),
)
@pytest.mark.slow
def test_any_geometry_of_a_convolution(channels: int, geometries: list[tuple[int, ...]]) -> None:
    """Input and weight gradients are right for every stride, padding and dilation, alone and in
    combination.
    """
    torch.manual_seed(5)
    report = train_report(Branches(channels, geometries), IMAGE, sizes=(2, 3))
    assert report.worst_absolute <= 1e-5


@pytest.mark.parametrize(
    ("kernel", "height"), [(1, 9), (3, 9), (3, 8)]
)  # lying by channels, and the last in planes
def test_ties_of_a_maximum_go_to_the_first(kernel: int, height: int) -> None:
    """Flat patches give equal activations; the gradient goes where PyTorch sends it, which `place`
    tells.
    """

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 3, kernel, padding=kernel // 2)
            self.head = nn.Linear(3 * 4 * 4, 3)
            self.place = nn.Parameter(torch.zeros(3, height, 8))

        def forward(self, x: Tensor) -> Tensor:
            coarse = torch.sign(x[:, :, :1, :1]).expand_as(x) * 0.5
            rows = torch.arange(float(height))[:, None]
            columns = torch.arange(8.0)
            odd = (
                2 * ((rows + columns) % 2) - 1
            )  # the second and the third of a window are its equal maxima
            return self.head(
                torch.max_pool2d(self.conv(coarse).abs() * odd + self.place, 2).flatten(1)
            )

    torch.manual_seed(3)
    assert train_report(Flat(), Signature((2, height, 8), "float32", 3)).worst_absolute <= 1e-5
