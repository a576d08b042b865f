"""Models of which parts never train, or are computed from others, are cut and train as in
PyTorch.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from models import architecture, build, infer_layout
from models.zoo.conversion_plan import converted
from tests.trainer_export.helpers import shaken, train_report
from trainer_export.model_inputs import Signature


class Echo(nn.Module):
    """An echo-state network: inputs and recurrence are drawn once and stay."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.into = nn.Parameter(0.5 * torch.randn(hidden, 6), requires_grad=False)
        self.around = nn.Parameter(0.2 * torch.randn(hidden, hidden), requires_grad=False)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], len(self.around))
        for step in x.unbind(1):
            state = torch.tanh(step @ self.into.T + state @ self.around.T)
        out: Tensor = self.head(state)
        return out


class FrozenNorm(nn.Module):
    """A batch norm that its author keeps in eval mode while the model trains."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(4, hidden, 1)
        self.norm = nn.BatchNorm1d(hidden).requires_grad_(False)
        self.head = nn.Linear(hidden, classes)

    def train(self, mode: bool = True) -> "FrozenNorm":
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.first(x)).relu().mean(2))
        return out


def plain_norms(hidden: int, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(4, hidden, 1),
        nn.GroupNorm(1, hidden, affine=False),
        nn.InstanceNorm1d(hidden),
        nn.ReLU(),
        nn.AvgPool1d(6),
        nn.Flatten(),
        nn.LayerNorm(hidden, elementwise_affine=False),
        nn.Linear(hidden, classes),
    )


def normed_weights(hidden: int, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        spectral_norm(nn.Linear(24, hidden)),
        nn.ReLU(),
        weight_norm(nn.Linear(hidden, hidden)),
        nn.Linear(hidden, classes),
    )


@pytest.mark.parametrize(
    "kind", [Echo, FrozenNorm, plain_norms, normed_weights], ids=lambda kind: kind.__name__
)
def test_half_of_it_trains_as_in_pytorch(kind: Callable[[int, int], nn.Module]) -> None:
    """Its layout is proved, and what is frozen stays."""

    @architecture()
    def custom(cut, *, input_shape=(4, 6), classes=3):  # type: ignore[no-untyped-def]
        return kind(cut.width("hidden", 8), cut.classes(classes))

    arch = converted(custom)
    layout = infer_layout(arch)
    assert {item.name for item in layout.base} == {
        name for name, value in build(arch).named_parameters() if not value.requires_grad
    }
    torch.manual_seed(3)
    module = shaken(build(arch, 0.5))
    signature = Signature((4, 6), "float32", 3, base=tuple(layout.base_of(layout.tier(0.5))))
    assert (
        train_report(module, signature.with_places_of(module), sizes=(5, 3)).worst_absolute <= 1e-5
    )
