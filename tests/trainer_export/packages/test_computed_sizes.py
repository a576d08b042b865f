"""An axis whose narrow models compute larger sizes than the whole one is refused."""

import pytest

from trainer_export.packages.axis_forms import AxisForm, groups_form, heads_form
from trainer_export.packages.builder import exportable
from trainer_export.packages.loading import package_model
from trainer_export.packages.narrow_run import refusal_of_narrow

ENCODER = "tests.trainer_export.packages.small_models:Encoder"
SIZES = {"input_shape": (3, 5), "embed_dim": 12, "num_heads": 4, "hidden": 8}


@pytest.mark.parametrize(
    "form",
    [
        groups_form({"num_heads": 4, "embed_dim": 12}, 4),
        heads_form("embed_dim", 12, 4),
        groups_form({"hidden": 8}, 4),
    ],
    ids=lambda form: form.call,
)
def test_what_only_leaves_units_out_is_accepted(form: AxisForm) -> None:
    """Whole heads with their part of the stream, thinner heads, or fewer hidden units."""
    assert refusal_of_narrow(exportable(package_model(ENCODER, SIZES), [form])) == ""


def test_fewer_heads_of_the_same_stream_are_refused() -> None:
    """The attention's parameters keep their shapes, but two heads are twice as large as four."""
    form = groups_form({"num_heads": 4, "hidden": 8}, 4)
    refusal = refusal_of_narrow(exportable(package_model(ENCODER, SIZES), [form]))
    assert refusal.startswith("the whole model computes [")
    assert refusal.endswith("so what remains has another meaning")
