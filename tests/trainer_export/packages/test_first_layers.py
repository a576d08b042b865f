"""In a model whose layers are cut together, layers that take samples or tables keep their inputs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from models import infer_layout
from trainer_export.packages.builder import architecture_of
from trainer_export.packages.discovery import discover_axes
from trainer_export.packages.first_layers import find_first_layers
from trainer_export.packages.package_model import PackageModel
from trainer_export.packages.scaled_layers import LAYER_PARTS, WHOLE, with_layer_parts

LAYERS = f"cut.groups('{LAYER_PARTS}', 8)"

Shapes = dict[str, tuple[int, ...]]


def model_of(make: Callable[..., nn.Module], shape: tuple[int, ...]) -> PackageModel:
    plain = PackageModel("", "first", make, {"num_classes": 3}, "num_classes", input_shape=shape)
    return with_layer_parts(plain)


def proved_at_half(model: PackageModel) -> Shapes:
    """Return the shapes at half of the width of a model whose layers can be cut together."""
    discovery = discover_axes(model)
    assert [form.call for form in discovery.forms] == ["cut.classes(classes)", LAYERS]
    layout = infer_layout(architecture_of(model, discovery.forms))
    return dict(layout.shapes(layout.tier(0.5)))


class Table(nn.Module):
    """Sines of places that a layer takes, as the encoding of positions in XCiT does."""

    def __init__(self, hidden_dim: int, dim: int) -> None:
        super().__init__()
        self.hidden_dim = hidden_dim
        self.projection = nn.Linear(2 * hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], dtype=torch.float32)[:, None]
        angles = places / torch.arange(1, self.hidden_dim + 1)
        encoded: Tensor = self.projection(torch.cat((angles.sin(), angles.cos()), 1))
        return encoded


class Tables(nn.Module):
    """Rows, and blocks to each of which a table is added."""

    def __init__(self, blocks: int = 2, num_classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 24)
        self.tables = nn.ModuleList(Table(8, 24) for _ in range(blocks))
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(blocks))
        self.head = nn.Linear(24, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for table, layer in zip(self.tables, self.layers, strict=True):
            x = layer(x + table(x)).tanh()
        logits: Tensor = self.head(x.mean(1))
        return logits


def test_a_layer_that_takes_a_table_keeps_its_inputs() -> None:
    """The table's places are not interchangeable, and the module that makes it knows its size."""
    shapes = proved_at_half(model_of(Tables, (4, 5)))
    assert shapes["tables.0.projection.weight"] == (12, 16)
    assert shapes["tables.1.projection.weight"] == (12, 16)
    assert shapes["layers.0.weight"] == (12, 12)


def test_layers_of_a_deeper_model_are_those_of_the_same_lines() -> None:
    plain = PackageModel(
        "", "first", Tables, {"blocks": 2, "num_classes": 3}, "num_classes", (4, 5)
    )
    deeper = with_layer_parts(plain).build({"blocks": 3, LAYER_PARTS: WHOLE // 2})
    assert deeper.get_parameter("tables.2.projection.weight").shape == (12, 16)
    assert deeper.get_parameter("layers.2.weight").shape == (12, 12)


class Normed(nn.Module):
    """A norm of the sample before the first layer, as ViTs of vit-pytorch have."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.stem = nn.Linear(16, 32)
        self.head = nn.Linear(32, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.stem(self.norm(x)).tanh())
        return logits


class Depthwise(nn.Module):
    """A convolution of each of eight channels by itself before the first layer."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.norm = nn.Conv2d(8, 8, 3, groups=8)
        self.stem = nn.Conv2d(8, 32, 1)
        self.head = nn.Linear(32, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.stem(self.norm(x)).tanh().mean((2, 3)))
        return logits


@pytest.mark.parametrize(("make", "shape"), [(Normed, (16,)), (Depthwise, (8, 5, 5))])
def test_what_keeps_the_features_of_a_sample_apart_stays_whole(
    make: type[nn.Module], shape: tuple[int, ...]
) -> None:
    """So does the input of the layer behind it, which takes these features."""
    model = model_of(make, shape)
    shapes = proved_at_half(model)
    whole = {name: tuple(value.shape) for name, value in model.build({}).named_parameters()}
    assert shapes["norm.weight"] == whole["norm.weight"]
    assert shapes["stem.weight"][:2] == (16, shape[0])


class Branches(nn.Module):
    """Two layers that take the sample."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(16, 24)
        self.second = nn.Linear(16, 24)
        self.head = nn.Linear(24, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.first(x).tanh() + self.second(x).sin())
        return logits


def test_every_layer_that_takes_the_sample_keeps_its_inputs() -> None:
    shapes = proved_at_half(model_of(Branches, (16,)))
    assert shapes["first.weight"] == shapes["second.weight"] == (12, 16)


def test_a_model_that_does_not_run_has_no_first_layers() -> None:
    """The search for axes says why it fails."""
    first = find_first_layers(model_of(Branches, (9,)))
    assert not first.fixed
    assert not first.tables


def test_a_model_that_computes_with_values_runs_on_the_processor() -> None:
    """Without values, its rows would not be known."""

    class Chosen(Branches):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + 0 * x.sum().item())

    first = find_first_layers(model_of(Chosen, (16,)))
    assert [*first.fixed.values()] == [[True], [True], [False]]
