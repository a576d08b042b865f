"""Programs that the exporter records are those of `make_fx`, which records all others."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fleet_protocol.errors import ExportError
from tests.trainer_export.helpers import recipe_for, tiny
from trainer_export import traced_program
from trainer_export.fake_shapes import ShapeMode
from trainer_export.formats.onnx import write_forward_graphs, write_graphs
from trainer_export.model_inputs import Signature
from trainer_export.recipe import Recipe
from trainer_export.recorder import UnfitError, _Recorder, record

PLAIN = Signature((4,), "float32", 3)


class _Of(nn.Module):
    """A layer, and a function of its result."""

    def __init__(self, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.layer(x))


@pytest.fixture
def by_make_fx(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An entry for every program that PyTorch's tracer recorded."""
    seen: list[str] = []
    record_by_make_fx = traced_program._record_by_make_fx

    def noted(*arguments: Any) -> Any:
        seen.append("program")
        return record_by_make_fx(*arguments)

    monkeypatch.setattr(traced_program, "_record_by_make_fx", noted)
    return seen


def refuse(*_: Any) -> None:
    raise UnfitError


def of_make_fx(write: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is written if PyTorch's tracer records everything."""
    with monkeypatch.context() as patch:
        patch.setattr(traced_program, "record", refuse)
        return write()


def data_of(files: Any) -> list[bytes]:
    return [file.data for file in files]


@pytest.mark.parametrize(
    "name",
    ["mlp", "har_cnn", pytest.param("minilm_encoder", marks=pytest.mark.slow)],
)
def test_graphs_are_those_of_make_fx(
    name: str, by_make_fx: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte, at both widths, and none of them needs it."""

    def written() -> list[bytes]:
        files = []
        for width in (1.0, 0.5):
            files += write_graphs(*tiny(name, width), recipe_for(name))
        return data_of(files)

    own = written()
    assert not by_make_fx
    assert own == of_make_fx(written, monkeypatch)
    assert by_make_fx


@pytest.mark.parametrize(
    "after",
    [
        lambda y: y.clone().relu_() + 1.0,
        lambda y: y + torch.tensor([1.0, 2.0, 3.0]),
        lambda y: torch.cat(y.split(1, dim=1)[::-1], dim=1),
        lambda y: (y.t() @ y).sum() + y.reshape(-1).view(y.shape[0], 3),
        lambda y: y.max(dim=1, keepdim=True).values * y,
    ],
    ids=["in place", "constant", "parts", "views", "two results"],
)
def test_a_program_is_that_of_make_fx(
    after: Callable[[Tensor], Tensor], by_make_fx: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte: with views, constants, operators in place and with several results."""

    def written() -> list[bytes]:
        return data_of(write_forward_graphs(_Of(after), PLAIN, Recipe()))

    own = written()
    assert not by_make_fx
    assert own == of_make_fx(written, monkeypatch)


def test_a_number_of_a_constant_is_left_to_make_fx(by_make_fx: list[str]) -> None:
    """It knows the values of small constants."""
    files = write_forward_graphs(_Of(lambda y: y * torch.tensor(2.0).item()), PLAIN, Recipe())
    assert by_make_fx
    assert files


def test_a_refusal_is_that_of_make_fx() -> None:
    """A number made of the batch is named, and a branch on a value has the advice on it."""
    with pytest.raises(ExportError, match="on the batch size"):
        write_forward_graphs(_Of(lambda y: y * (1.0 / y.shape[0])), PLAIN, Recipe())
    with pytest.raises(ExportError, match="must not depend on the values"):
        write_forward_graphs(_Of(lambda y: y if y.sum() > 0 else -y), PLAIN, Recipe())


def test_what_needs_more_is_not_recorded() -> None:
    """A number that no shape determines, the value of a constant, and a number that is no size."""
    mode = ShapeMode(shape_env=ShapeEnv())
    context: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    fake = mode.from_tensor(torch.zeros(5, 2), symbolic_context=context)
    with mode, enable_python_dispatcher():
        for number in (lambda x: x.sum().item(), lambda _: torch.tensor(2.0).item()):
            with pytest.raises(UnfitError):
                record(lambda x, number=number: [x * number(x)], [fake], {})
    recorder = _Recorder({})
    assert recorder.argument([fake.shape[0], 2]) == [fake.shape[0], 2]
    with pytest.raises(UnfitError):
        recorder.argument(0.5 * fake.shape[0])


def test_a_trace_does_not_load_the_compiler() -> None:
    """PyTorch loads it to find the line of a condition on the batch, in half a second."""
    code = (
        "import sys; from trainer_export.traced_program import warm_up; warm_up();"
        " sys.exit('torch._inductor.sizevars' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
