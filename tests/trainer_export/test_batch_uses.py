"""Programs traced with a number for the batch are those that a symbol gives, or are traced with a
symbol.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fleet_protocol.errors import ExportError
from models import build, infer_layout
from tests.gallery import GALLERY
from tests.trainer_export.helpers import tiny
from trainer_export import traced_program
from trainer_export.batch_uses import Known, describe, mark_of
from trainer_export.batches import SizedBatches
from trainer_export.formats.onnx import check_graphs, write_forward_graphs, write_graphs
from trainer_export.graph import Port
from trainer_export.model_inputs import Signature
from trainer_export.recipe import Recipe


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The batch of every trace so far, None for a symbol."""
    seen: list[int | None] = []

    def noted(program: fx.GraphModule, mark: int | None) -> None:
        seen.append(mark)
        describe(program, mark)

    monkeypatch.setattr(traced_program, "describe", noted)
    return seen


PLAIN = Signature((4,), "float32", 3)


def graphs(module: nn.Module, signature: Signature, known: Known) -> dict[str, bytes]:
    given = Signature(
        signature.input_shape,
        signature.input_dtype,
        signature.classes,
        row=signature.row,
        known=known,
    )
    return {
        file.key: file.data for file in write_graphs(module, given.with_places_of(module), Recipe())
    }


@pytest.mark.parametrize("name", ["mlp", pytest.param("minilm_encoder", marks=pytest.mark.slow)])
def test_a_narrow_tier_takes_the_batch_where_the_whole_does(
    name: str, marks: list[int | None]
) -> None:
    """With scales that the whole has not, and byte for byte as a symbol gives it."""
    known: Known = {}
    graphs(*tiny(name), known)
    first = len(marks)
    assert set(marks) == {None}
    found = graphs(*tiny(name, 0.5), known)
    assert marks[first:] == [10007] * first
    assert found == graphs(*tiny(name, 0.5), {})


def test_statistics_of_a_narrow_tier_are_traced_with_a_number(marks: list[int | None]) -> None:
    """An unbiased variance divides by a multiple of the batch less one."""
    known: Known = {}
    graphs(*tiny("har_cnn"), known)
    first = len(marks)
    found = graphs(*tiny("har_cnn", 0.5), known)
    assert "onnx/stats" in found
    assert marks[first:] == [10007] * first
    assert found == graphs(*tiny("har_cnn", 0.5), {})


class _Last(nn.Module):
    """Gives what `last` makes of the batch."""

    def __init__(self, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x))


@pytest.mark.parametrize(
    "last",
    [
        lambda x: torch.cat([x, x[:1]])[:-1],
        lambda x: x.reshape(-1, 1).expand(-1, 2)[:, 0].reshape(x.shape),
        lambda x: x.repeat(2, 1)[: x.shape[0]],
        lambda x: x + torch.arange(x.shape[0] + 2)[1:-1].unsqueeze(1),
    ],
)
def test_what_uses_the_batch_otherwise_is_traced_with_a_symbol(
    last: Any, marks: list[int | None]
) -> None:
    """The first tier is a plain one, and what it does with the batch says nothing about the
    other.
    """
    signature = Signature((4,), "float32", 3, known={})
    module = _Last(last)
    write_forward_graphs(_Last(lambda x: x), signature, Recipe())
    files = write_forward_graphs(module, signature, Recipe())
    assert marks == [None, 10007, None]
    assert [f.data for f in files] == [
        f.data for f in write_forward_graphs(module, PLAIN, Recipe())
    ]
    check_graphs(files, module, Recipe(), SizedBatches(signature))


def test_what_a_narrow_tier_leaves_out_needs_no_symbol(marks: list[int | None]) -> None:
    """As a copy of a size of 1, while what the whole does not have is new."""
    signature = Signature((4,), "float32", 3, known={})
    module = _Last(lambda x: x)
    write_forward_graphs(_Last(lambda x: x.repeat(1, 2)[:, :3]), signature, Recipe())
    files = write_forward_graphs(module, signature, Recipe())
    assert marks == [None, 10007]
    assert [f.data for f in files] == [
        f.data for f in write_forward_graphs(module, PLAIN, Recipe())
    ]


def test_sums_of_sizes_are_always_traced_with_a_symbol(marks: list[int | None]) -> None:
    """A number does not say which part of it is the batch."""
    signature = Signature((4,), "float32", 3, known={})
    for _ in range(2):
        write_forward_graphs(_Last(lambda x: torch.cat([x, x[:1]])[:-1]), signature, Recipe())
    assert marks == [None, None]


def test_a_number_made_of_the_batch_is_not_published() -> None:
    """Where only a narrow tier has it, the trace does not show it, but PyTorch does."""
    known: Known = {}
    signature = Signature((4,), "float32", 3, known=known)
    write_forward_graphs(_Last(lambda x: x * 0.5), signature, Recipe())
    module = _Last(lambda x: x * (1.0 / x.shape[0]))
    files = write_forward_graphs(module, signature, Recipe())
    with pytest.raises(ExportError, match="differs from PyTorch"):
        check_graphs(files, module, Recipe(), SizedBatches(signature))


def test_the_number_divides_no_other_size() -> None:
    """As a vocabulary of ten thousand and seven would."""
    x = Port("x", "float32", ("batch", 30))
    assert mark_of([x]) == 10007
    assert mark_of([x, Port("w", "float32", (30, 20014))]) == 10009
    assert mark_of([x, Port("w", "float32", (10009, 20014))]) is None
    assert mark_of([x, Port("w", "float32", (30, 10006))]) == 10009


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conv_lstm", "fused_qkv", "group_norm_whole", "unet"])
def test_tiers_of_the_gallery_are_what_a_symbol_gives(name: str, marks: list[int | None]) -> None:
    """Byte for byte, at every width."""
    model = GALLERY[name]
    layout = infer_layout(model.arch)
    known = Known()
    row = model.arch.row(layout.settings)
    signature = Signature(row.shape, row.dtype, layout.classes, row=row)
    for width in (1.0, 0.5, 0.25):
        module = build(model.arch, width)
        assert graphs(module, signature, known) == graphs(module, signature, {})
    assert 10007 in marks
