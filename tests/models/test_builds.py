"""Models that are built for their shapes compute nothing in their constructor."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from models.zoo.builds import SkippedInitialization


class Recorded(TorchDispatchMode):
    """The in-place operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.endswith("_"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def truncated_normal(weight: Tensor) -> Tensor:
    """Draw from a truncated normal distribution as timm does."""
    return weight.uniform_(-1, 1).erfinv_().mul_(0.02).add_(0.1).clamp_(min=-2, max=2)


def operators_of(fill: Callable[[Tensor], Tensor], device: str) -> list[str]:
    with torch.device(device), SkippedInitialization(), torch.no_grad(), Recorded() as recorded:
        weight = nn.Parameter(torch.empty(4, 3))
        assert fill(weight) is weight
    return recorded.names


def test_an_initialization_without_memory_runs_no_operator() -> None:
    """PyTorch's rules for the shapes of these operators take longer than all other layers."""
    assert operators_of(truncated_normal, "meta") == []


def test_with_memory_the_values_are_adjusted() -> None:
    """A constructor may read them afterwards."""
    assert "aten::clamp_" in operators_of(truncated_normal, "cpu")


def test_other_changes_of_a_tensor_without_memory_are_made() -> None:
    """These operators change the shape."""
    assert operators_of(lambda weight: weight.unsqueeze_(0), "meta") == ["aten::unsqueeze_"]
