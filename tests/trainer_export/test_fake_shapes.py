"""Element-wise operators on fake tensors have the shapes, types and strides that PyTorch finds."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from tests.trainer_export.helpers import recipe_for, tiny
from trainer_export import fake_shapes, traced_program
from trainer_export.fake_shapes import ShapeMode
from trainer_export.formats.onnx import write_graphs

_OPERATORS = sorted(fake_shapes._ELEMENTWISE, key=str)
_SHAPES: tuple[list[int], ...] = ([5, 4, 3], [4, 3], [4, 1], [1, 1, 1], [])
_BATCH = DimDynamic.DYNAMIC
_FIXED = DimDynamic.STATIC


def fakes(mode: FakeTensorMode, shapes: Sequence[list[int]]) -> list[Tensor]:
    """Fake tensors; where the mode has symbols, a first size of 5 is one."""
    made: list[Tensor] = []
    for shape in shapes:
        dims = [_BATCH if size == 5 and mode.shape_env else _FIXED for size in shape]
        context: Any = StatelessSymbolicContext(dynamic_sizes=dims)
        plain = torch.zeros(shape)
        made.append(mode.from_tensor(plain, symbolic_context=context if mode.shape_env else None))
    return made


def looks(result: Any) -> tuple[Any, ...]:
    return tuple(map(str, result.shape)), tuple(map(str, result.stride())), result.dtype


def tensors_of(operator: Any) -> int:
    return sum(str(argument.type) == "Tensor" for argument in operator._schema.arguments)


def numbers_of(operator: Any) -> list[float]:
    if operator is torch.ops.aten.clamp.default:
        return [0.5]  # it asks for one of two optional bounds
    arguments = operator._schema.arguments
    return [2.0 for a in arguments if a.type.kind() == "NumberType" and not a.has_default_value()]


def results(
    mode: FakeTensorMode, operator: Any, shapes: Sequence[list[int]]
) -> list[tuple[Any, ...]]:
    """What an operator returns for each operand, and each pair of operands."""
    seen: list[tuple[Any, ...]] = []
    with mode, enable_python_dispatcher():
        tensors = fakes(mode, shapes)
        for left in tensors:
            if tensors_of(operator) == 1:
                seen.append(looks(operator(left, *numbers_of(operator))))
                continue
            for right in tensors:
                wide = left.dim() >= right.dim()
                if wide or operator.name().count("backward") == 0:
                    seen.append(looks(operator(left, right, *numbers_of(operator))))
    return seen


@pytest.mark.parametrize("has_symbol", [False, True], ids=["number", "symbol"])
def test_every_operator_has_the_result_that_pytorch_finds(has_symbol: bool) -> None:
    """For operands of equal sizes, of broadcast ones, and of one number."""
    for operator in _OPERATORS:
        env = (ShapeEnv(), ShapeEnv()) if has_symbol else (None, None)
        own = results(ShapeMode(shape_env=env[0]), operator, _SHAPES)
        pytorchs = results(FakeTensorMode(shape_env=env[1]), operator, _SHAPES)
        assert own == pytorchs, operator


def test_the_usual_case_is_not_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise nothing would be saved."""

    def refuse(*_: Any) -> None:
        raise AssertionError("left to PyTorch")

    mode = ShapeMode(shape_env=ShapeEnv())
    x, row = fakes(mode, [[5, 4], [4]])
    with mode:
        monkeypatch.setattr(FakeTensorMode, "dispatch", refuse)
        for result in (torch.relu(x), x * row, x + 1.0, torch.sqrt(row)):
            assert type(result) is FakeTensor


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.zeros(4, 3).t(), torch.zeros(3, 4)),
        (torch.zeros(3, 1), torch.zeros(1, 4)),
        (torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, 4)),
        (torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3, 4)),
        (torch.zeros(1, 4, 3, 1).to(memory_format=torch.channels_last), torch.zeros(1, 4, 3, 1)),
    ],
    ids=["transposed", "both broadcast", "whole numbers", "double", "channels last"],
)
def test_unusual_operands_are_left_to_pytorch(left: Tensor, right: Tensor) -> None:
    """Other strides and types have the result that PyTorch finds."""
    seen = []
    for kind in (ShapeMode, FakeTensorMode):
        mode = kind()
        with mode:
            seen.append(looks(mode.from_tensor(left) + mode.from_tensor(right)))
    assert seen[0] == seen[1]


def test_graphs_are_those_of_pytorchs_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte."""
    module, signature = tiny("mlp")
    own = write_graphs(module, signature, recipe_for("mlp"))
    monkeypatch.setattr(traced_program, "ShapeMode", FakeTensorMode)
    plain = write_graphs(module, signature, recipe_for("mlp"))
    assert [file.data for file in own] == [file.data for file in plain]
