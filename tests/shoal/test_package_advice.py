"""Advice for users of a package accompanies errors about its model, and no others."""

import pytest

from fleet_protocol.errors import (
    ChoiceError,
    ConfigError,
    ExportError,
    ModelError,
    ShoalError,
    StorageError,
)
from models.registry import infer_layout
from shoal.cli.package_options import FoundModel
from trainer_export.packages.axis_forms import width_form
from trainer_export.packages.builder import architecture_of, exportable
from trainer_export.packages.loading import package_model
from trainer_export.packages.package_model import PackageModel

ENCODER = "tests.trainer_export.packages.small_models:Encoder"
ADVICE = "belongs to its package"


def encoder() -> PackageModel:
    return package_model(ENCODER, {"input_shape": (3, 5)})


@pytest.mark.parametrize(
    ("error", "is_advised"),
    [
        (ModelError("units are not interchangeable"), True),
        (ExportError("an operator cannot be exported"), True),
        (ChoiceError("raise --memory"), False),
        (ConfigError("unknown format"), False),
        (StorageError("the disk is full"), False),
    ],
)
def test_an_error_says_whether_it_is_about_the_model(
    error: ShoalError, is_advised: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model = encoder()
    found = FoundModel(model, architecture_of(model, ()), None)
    with pytest.raises(type(error)), found.advising():
        raise error
    assert (ADVICE in capsys.readouterr().err) is is_advised


def test_a_refused_axis_is_about_the_model() -> None:
    """Heads of another size compute something else, and only another forward could change that."""
    arch = exportable(encoder(), [width_form("embed_dim", 12)])
    with pytest.raises(ConfigError) as caught:
        infer_layout(arch)
    assert caught.value.is_about_model
