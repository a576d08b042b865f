"""Refusals of a package's model come with advice that its user can carry out."""

from typing import Any

import pytest
import torch
from torch import nn

from fleet_protocol.errors import ConfigError, ExportError, ModelError
from fleet_protocol.recipe import RecipeTable
from models import infer_layout
from models.zoo.conversion_plan import convert_where_needed
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.packages import refusals, transformers_models
from trainer_export.packages.axis_forms import classes_form
from trainer_export.packages.builder import architecture_of, exportable
from trainer_export.packages.discovery import discover_axes
from trainer_export.packages.loading import package_model
from trainer_export.packages.narrow_run import require_run
from trainer_export.packages.package_model import PackageModel
from trainer_export.packages.refusals import advice_on_refusal, rates_that_draw
from trainer_export.packages.sizes import rates_of
from trainer_export.packages.transformers_models import shallow_module
from trainer_export.packages.trial import can_export
from trainer_export.recipe import Recipe

MODELS = "tests.trainer_export.packages.small_models"
SKIPPING = f"{MODELS}:Skipping"
DOWNLOADING = f"{MODELS}:downloading"


def skipping(**arguments: Any) -> PackageModel:
    return package_model(SKIPPING, {"input_shape": (4,), **arguments})


def test_the_rates_that_no_graph_can_take_are_found() -> None:
    """Not that of dropout, whose random numbers are an input of the graph."""
    assert rates_that_draw(skipping()) == ("layerdrop", "mask_prob")
    assert rates_that_draw(skipping(mask_prob=0.0)) == ("layerdrop",)
    assert rates_that_draw(skipping(mask_prob=0.0, layerdrop=0.0)) == ()


def export(model: PackageModel, folder: Any) -> None:
    forms = [classes_form("num_classes", 3)]
    arch, _ = convert_where_needed(architecture_of(model, forms), {})
    layout = infer_layout(arch)
    request = ExportRequest(arch, {}, [layout.tier(1.0)], Recipe.from_table(RecipeTable(), {}))
    export_architecture(request, folder, ExportOptions(formats=["onnx"]))


def test_the_advice_works_as_it_is_written(tmp_path: Any) -> None:
    """The model is refused, and exported with the options that the advice names."""
    model = skipping()
    with pytest.raises(ExportError):
        export(model, tmp_path / "refused")
    advice = advice_on_refusal(model)
    assert advice.endswith("it draws none with --set layerdrop=0.0 --set mask_prob=0.0")
    export(skipping(layerdrop=0.0, mask_prob=0.0), tmp_path / "exported")


def test_noise_that_samples_share_is_named(tmp_path: Any) -> None:
    """Only the rate of that layer, because a graph takes the noise of the other."""
    spec = f"{MODELS}:SharedNoise"
    shape = {"input_shape": (4,)}
    with pytest.raises(ExportError, match="table_drop draws noise for"):
        export(package_model(spec, shape), tmp_path / "refused")
    assert advice_on_refusal(package_model(spec, shape)).endswith("with --set table_drop=0.0")
    export(package_model(spec, {**shape, "table_drop": 0.0}), tmp_path / "exported")


def test_a_number_that_helps_at_0_is_named() -> None:
    """Not another one, with which at 0 the model does not run."""
    model = package_model(f"{MODELS}:Rescaled", {"input_shape": (4,)})
    assert advice_on_refusal(model).endswith("can be exported with --set rescale_every=0")


def test_no_other_model_is_named_if_the_graphs_can_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then something else is refused, which another class does not change."""
    monkeypatch.setattr(refusals, "_class_that_exports", lambda _model: "Other")
    model = package_model(f"{MODELS}:Encoder", {"input_shape": (3, 5)})
    assert "no other remedy is known" in advice_on_refusal(model)
    headless = package_model(f"{MODELS}:Headless", {"input_shape": (4,), "output_name": 0})
    assert "class=Other" in advice_on_refusal(headless)


def test_outputs_are_named_of_which_one_can_be_taken() -> None:
    """The advice works as it is written, with a loss of numbers for an output without labels."""
    spec = f"{MODELS}:Headless"
    shape = {"input_shape": (4,)}
    with pytest.raises(ModelError, match="2 outputs"):
        infer_layout(architecture_of(package_model(spec, shape), ()))
    with pytest.raises(ModelError, match="has 2 outputs, none of which has labels"):
        discover_axes(package_model(spec, shape))
    advice = advice_on_refusal(package_model(spec, shape))
    assert "returns the outputs 0, 1" in advice
    assert advice.endswith("--set output_name=0")
    chosen = package_model(spec, {**shape, "output_name": 1})
    assert infer_layout(architecture_of(chosen, ())).classes == 8
    with pytest.raises(ModelError, match="no output '2'; there are 0, 1"):
        discover_axes(package_model(spec, {**shape, "output_name": 2}))
    with pytest.raises(ModelError, match="one tensor, so leave out output_name"):
        discover_axes(package_model(f"{MODELS}:Unlabelled", {**shape, "output_name": 0}))


def test_an_output_with_labels_is_named_first() -> None:
    """Not the hidden numbers beside it, for which there is no loss of labels."""
    model = package_model(f"{MODELS}:WithHidden", {"input_shape": (4,)})
    advice = advice_on_refusal(model)
    assert "returns the outputs hidden, scores" in advice
    assert advice.endswith("--set output_name=scores")


def test_labels_are_not_tried_at_0() -> None:
    """They change no parameter of a model without a head, and nothing can be trained without."""
    model = package_model(f"{MODELS}:Headless", {"input_shape": (4,)})
    assert "num_classes=0" not in advice_on_refusal(model)


def test_a_constructor_that_fails_gets_advice_about_its_arguments() -> None:
    """The refusal has the constructor's own message; nothing is tried, and nothing else fails."""
    arguments = {"num_groups": 3, "num_channels": 4, "input_shape": (4,)}
    model = package_model("torch.nn:GroupNorm", arguments)
    with pytest.raises(ModelError, match="must be divisible by num_groups"):
        discover_axes(model)
    assert "does not accept these arguments" in advice_on_refusal(model)


def test_a_model_that_draws_in_evaluation_is_refused_before_the_search() -> None:
    """As one that masks patches at random; each proof of an axis would fail for that reason."""
    model = package_model(f"{MODELS}:Masking", {"input_shape": (64,)})
    with pytest.raises(
        ModelError, match=r"draws random numbers \(rand in line \d+ of small_models"
    ):
        require_run(exportable(model, ()))


def test_numbers_that_change_no_output_may_be_drawn() -> None:
    model = package_model(f"{MODELS}:Masking", {"input_shape": (64,), "mask_ratio": 0.0})
    assert require_run(exportable(model, ())).outputs == 1


def test_a_model_without_parameters_is_refused() -> None:
    """As a layer that only computes, of which half would be nothing."""
    model = package_model("torch.nn:Threshold", {"threshold": 1, "value": 0, "input_shape": (4,)})
    with pytest.raises(ConfigError, match="threshold has no parameters"):
        discover_axes(model)


@pytest.mark.parametrize(
    ("name", "exports"), [("Encoder", True), ("SharedNoise", False), ("Skipping", False)]
)
def test_a_trial_tells_what_an_export_does(name: str, exports: bool) -> None:
    """With all rates as they are."""
    shape = (3, 5) if name == "Encoder" else (4,)
    assert can_export(package_model(f"{MODELS}:{name}", {"input_shape": shape})) is exports


def test_other_advice_says_that_there_is_no_more() -> None:
    advice = advice_on_refusal(skipping(mask_prob=0.0, layerdrop=0.0))
    assert "no other remedy is known" in advice


@pytest.mark.parametrize("further", [{"input_shape": (5,)}, {"output_name": "hidden"}])
def test_a_model_that_does_not_run_gets_no_further_advice(further: Any) -> None:
    """The refusal names the shape or the output that the user gave."""
    assert advice_on_refusal(skipping(mask_prob=0.0, layerdrop=0.0, **further)) == ""


def test_inputs_that_a_model_also_requires_are_named() -> None:
    """No option gives them, but a builder can."""
    model = package_model(f"{MODELS}:Forecast", {"input_shape": (4,)})
    with pytest.raises(ModelError, match=r"Forecast also requires times, observed, .*a builder"):
        discover_axes(model)
    assert advice_on_refusal(model) == ""


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 8, 8), "--set in_chans=1"),
        ((3, 12, 12), "--set img_size=12"),
        ((1, 12, 12), "--set in_chans=1 --set img_size=12"),
    ],
)
def test_arguments_that_fit_the_samples_are_named(shape: tuple[int, ...], options: str) -> None:
    """They were tried: the model runs with them."""
    model = package_model(f"{MODELS}:Photos", {"input_shape": shape})
    with pytest.raises(ModelError):
        discover_axes(model)
    assert advice_on_refusal(model).endswith(f"runs on samples of this shape with {options}")


def test_no_argument_is_named_that_does_not_help() -> None:
    """The model takes square pictures only."""
    model = package_model(f"{MODELS}:Photos", {"input_shape": (3, 12, 9)})
    assert advice_on_refusal(model) == ""


def test_rates_are_found_in_nested_arguments() -> None:
    arguments = {"drop": 0.1, "eps": 0.0, "scale": 2.0, "config": {"rates": [0.5, 1]}}
    assert rates_of(arguments) == {"drop": 0.1, "config.rates.0": 0.5}


def test_a_configuration_that_refuses_one_block_is_tried_whole() -> None:
    """Such as one that has a list with an entry for each block."""

    def make(num_layers: int) -> nn.Module:
        if num_layers != 2:
            raise ValueError("the list has 2 entries")
        return nn.Linear(num_layers, 3)

    model = PackageModel("", "x", make, {"num_layers": 2})
    assert shallow_module(model).get_parameter("weight").shape == (3, 2)


class _Kinds:
    """A configuration that derives the kind of each block: every third sees near tokens only."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks

    @classmethod
    def from_dict(cls, fields: dict[str, int]) -> "_Kinds":
        return cls(fields["num_layers"])

    def to_dict(self) -> dict[str, Any]:
        return {"layer_types": [("all", "all", "near")[i % 3] for i in range(self.blocks)]}


class _Blocks(nn.Module):
    def __init__(self, config: _Kinds) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.blocks))


def test_a_shallow_model_has_a_block_of_each_kind() -> None:
    """A mask that suits the first block may not suit the others."""
    make = transformers_models._FromConfig(_Kinds, _Blocks, {})
    shallow = shallow_module(PackageModel("", "x", make, {"num_layers": 12}))
    assert shallow.get_parameter("weight").shape == (3,)


def test_a_package_that_cannot_download_weights_gets_advice() -> None:
    """The name of the argument differs from package to package."""
    with pytest.raises(ConfigError, match="null, for example --set weights=null"):
        package_model(DOWNLOADING, {"input_shape": (4,)})
    model = package_model(DOWNLOADING, {"input_shape": (4,), "weights": None})
    assert model.build({}).get_parameter("bias").shape == (3,)
