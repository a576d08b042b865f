"""A package's model is built from its SPEC, its axes are found, and its builder can be written."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from fleet_protocol.errors import ConfigError
from fleet_protocol.recipe import RecipeTable
from models import Registry, infer_layout
from models.cut import Cut
from models.zoo.package_call import PackageCall, PackageOutput, adapt_call
from tests.trainer_export.packages.small_models import Encoder, Positions
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.packages.advice import advice_on_widths
from trainer_export.packages.axis_forms import groups_form, heads_form, parse_pins
from trainer_export.packages.builder import architecture_of
from trainer_export.packages.constructor import made_by, made_with
from trainer_export.packages.discovery import discover_axes
from trainer_export.packages.loading import package_model
from trainer_export.packages.masks import choose_mask
from trainer_export.packages.package_model import PackageModel
from trainer_export.packages.search_record import Discovery
from trainer_export.packages.sizes import sizes_of, with_sizes
from trainer_export.packages.trial import can_export
from trainer_export.packages.written_builder import write_builder
from trainer_export.recipe import Recipe

HERE = "tests.trainer_export.packages.small_models"
ENCODER = f"{HERE}:Encoder"


def encoder() -> PackageModel:
    return package_model(ENCODER, {"input_shape": (3, 5)})


def reasons(discovery: Discovery) -> dict[str, str]:
    """Why arguments stay whole."""
    return {"+".join(f.places): f.reason for f in discovery.findings if f.form is None}


def calls(discovery: Discovery) -> dict[str, str]:
    return {"+".join(f.places): f.form.call for f in discovery.findings if f.form}


def test_the_axes_of_an_encoder_are_found() -> None:
    """Its stream in heads, its hidden layer, its blocks and its labels; not its features."""
    discovery = discover_axes(encoder())
    assert calls(discovery) == {
        "num_classes": "cut.classes(classes)",
        "depth": "cut.depth(2)",
        "embed_dim": "cut.heads('embed_dim', 3, 4)",
        "hidden": "cut.width('hidden', 10)",
    }
    assert reasons(discovery)["num_heads"] == "moves no parameter"
    layout = infer_layout(architecture_of(encoder(), discovery.forms))
    assert layout.shapes(layout.tier(0.5, 1))["blocks.0.qkv.weight"] == (18, 6)
    # All axes were proved on the whole model, so the export needs no second proof.
    assert discovery.layout == layout


def test_axes_that_are_tried_on_few_blocks_are_proved_again() -> None:
    """A model has one depth; the number of blocks of another stack is small in proofs."""
    model = package_model(f"{HERE}:TwoStacks", {"input_shape": (3, 5)})
    discovery = discover_axes(model)
    assert "cut.depth(3)" in calls(discovery).values()
    assert reasons(discovery)["further"].startswith("is a depth as well")
    assert discovery.layout == infer_layout(architecture_of(model, discovery.forms))


def test_axes_are_tried_on_as_many_blocks_as_the_model_runs_with() -> None:
    discovery = discover_axes(package_model(f"{HERE}:Tapped", {"input_shape": (4,)}))
    assert calls(discovery)["width"] == "cut.width('width', 8)"


def test_a_function_that_builds_layers_for_a_class_makes_each_model_itself() -> None:
    """A class would get the layers of another model; what the function passes on is a size."""
    model = package_model(f"{HERE}:on_features", {"input_shape": (4,)})
    assert model.sizes == {"num_classes": 3, "hidden": 8, "layer_parts": 8, "layer_quarters": 4}
    whole = model.build({})
    assert not any(value.is_meta for value in whole.parameters())
    other = model.build({"num_classes": 5, "layer_parts": 4})
    shapes = {name: [*value.shape] for name, value in other.named_parameters()}
    assert shapes["features.0.weight"] == [8, 4]
    assert shapes["head.weight"] == [5, 4]
    assert [*whole.get_parameter("features.0.weight").shape] == [16, 4]


def test_a_function_of_a_package_shows_the_sizes_that_it_sets() -> None:
    """Places within a configuration are sizes; units that are not alike stay whole, and why."""
    model = package_model(f"{HERE}:positions", {"input_shape": (4,)})
    assert model.sizes == {
        "sizes.table": 6,
        "sizes.hidden": 8,
        "num_classes": 3,
        "layer_parts": 8,
        "layer_quarters": 4,
    }
    discovery = discover_axes(model)
    assert calls(discovery) == {
        "num_classes": "cut.classes(classes)",
        "sizes.hidden": "cut.width('sizes.hidden', 8)",
    }
    assert "not interchangeable" in reasons(discovery)["sizes.table"]
    # The arguments of the model stay as they were.
    assert isinstance(model.build({"sizes.hidden": 5}), Positions)
    assert model.sizes["sizes.hidden"] == 8


def test_a_model_without_a_width_gets_advice() -> None:
    """The message names the arguments that round sizes; a model with a width gets none."""
    model = encoder()
    without = Discovery((), (), 0.0)
    assert "hidden in its code" in advice_on_widths(model, without)
    rounded = replace(model, arguments={**model.arguments, "round_limit": 0.9})
    assert "rounded by round_limit" in advice_on_widths(rounded, without)
    forms = (heads_form("embed_dim", 12, 3),)
    assert advice_on_widths(model, Discovery(forms, (), 0.0)) == ""
    hardly = Discovery(forms, (), 0.0, share_at_half=0.97)
    assert "half of its width leaves 97% of its parameters" in advice_on_widths(model, hardly)


def test_a_constructor_that_passes_its_arguments_on_shows_those_of_its_base() -> None:
    """As that of a class that adds a head; a sequence of layers has no names to show."""

    class Passing(Encoder):
        def __init__(self, *args: int, **kwargs: int) -> None:
            super().__init__(*args, **kwargs)

    kind, arguments = made_by(partial(Passing, embed_dim=6))
    assert kind is Passing
    assert arguments == {
        "features": 5,
        "embed_dim": 6,
        "num_heads": 3,
        "hidden": 10,
        "depth": 2,
        "num_classes": 4,
    }
    assert made_by(partial(nn.Sequential, nn.Linear(2, 3))) == (nn.Sequential, None)


def test_arguments_that_a_function_sets_itself_are_those_of_its_class() -> None:
    """As the depths of a model of timm; an argument that the class lacks is named."""

    def tiny(**further: int) -> Encoder:
        return Encoder(embed_dim=6, **further)

    kind, arguments = made_with(tiny, {"embed_dim": 9, "depth": 3})
    assert arguments is not None
    assert kind(**arguments).head.in_features == 9
    assert arguments["depth"] == 3
    with pytest.raises(ConfigError, match="there is no argument width"):
        made_with(tiny, {"width": 9})


def test_a_user_decides_about_axes() -> None:
    """One is given another form and name, one stays whole, and the others are found."""
    model = encoder()
    pins = parse_pins(["embed_dim=heads:6,name=stream", "hidden=off"], model.sizes)
    discovery = discover_axes(model, pins)
    assert calls(discovery)["embed_dim"] == "cut.heads('stream', 6, 2)"
    assert reasons(discovery)["hidden"] == "stays whole, as --axis says"
    assert calls(discovery)["depth"] == "cut.depth(2)"


def test_a_model_that_does_not_run_is_refused_before_its_axes_are_tried() -> None:
    """Nothing that is said about an axis would help."""
    model = package_model(ENCODER, {"input_shape": (3, 6)})
    with pytest.raises(ConfigError, match=r"samples of shape \[3, 6\]: .*; with --set, give it"):
        discover_axes(model)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("embed_dim", "hidden_size=heads:4"),
        ("embed=width", "'embed' is not an argument"),
        ("emb_dim=width", r"number above 1 \(did you mean 'embed_dim'\?\)"),
        ("hidden=off,name=x", "leave out the name"),
        ("embed_dim=thin", "no form 'thin'"),
        ("embed_dim=heads", "need a number"),
        ("embed_dim=width:3", "need a number"),
        ("embed_dim=heads:5", "5 does not divide 12"),
        ("embed_dim+hidden=width", "only groups"),
    ],
)
def test_a_wrong_axis_is_refused(text: str, words: str) -> None:
    """The message says what the form is, or what there is."""
    with pytest.raises(ConfigError, match=words):
        parse_pins([text], encoder().sizes)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (("hidden=width", "hidden=off"), "another option decides about hidden"),
        (("hidden=width,name=a", "embed_dim=heads:3,name=a"), "another axis has the name 'a'"),
    ],
)
def test_decisions_that_contradict_one_another_are_refused(
    texts: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_pins(texts, encoder().sizes)


@pytest.mark.parametrize(("argument", "form"), [("embed_dim", "width"), ("hidden", "depth")])
def test_a_decision_that_does_not_hold_is_refused(argument: str, form: str) -> None:
    """The search neither drops it, nor takes another form without a word."""
    pins = parse_pins([f"{argument}={form}"], encoder().sizes)
    words = f"what --axis decides about {argument} does not hold"
    with pytest.raises(ConfigError, match=words) as caught:
        discover_axes(encoder(), pins)
    assert not caught.value.is_about_model


def test_one_output_is_a_number_and_no_label() -> None:
    """So it may be learned with a loss of numbers."""
    model = package_model(ENCODER, {"input_shape": (3, 5), "num_classes": 1})
    discovery = discover_axes(model)
    assert reasons(discovery)["num_classes"].startswith("is below 2")
    assert "cut.classes(classes)" not in calls(discovery).values()
    assert not can_export(model)


def test_a_model_of_tokens_that_got_numbers_is_named_the_option() -> None:
    with pytest.raises(ConfigError, match="add --set input_dtype=int64") as caught:
        discover_axes(package_model(f"{HERE}:Tokens", {"input_shape": (6,)}))
    assert not caught.value.is_about_model  # so no advice about the package's code follows
    tokens = {"input_shape": (6,), "input_dtype": "int64"}
    assert calls(discover_axes(package_model(f"{HERE}:Tokens", tokens)))


@pytest.mark.parametrize(
    ("spec", "arguments", "words"),
    [
        ("Encoder", {}, "transformers:FOLDER"),
        (ENCODER, {}, "input_shape"),
        (ENCODER, {"input_shape": (3, 5), "dim": 3}, "unexpected keyword argument 'dim'"),
        (f"{HERE}:Encodr", {}, "did you mean 'Encoder'"),
        (f"{HERE}:Sizes", {}, "does not return a torch module"),
        ("no_such_package.models:Net", {}, "no_such_package is not installed"),
        ("torhc.nn:Linear", {}, r"not installed here \(did you mean 'torch'\?\)"),
        (ENCODER, {"imput_shape": (3, 5)}, "did you mean 'input_shape'"),
        (ENCODER, {"input_shape": (3, 5), "embd_dim": 3}, "did you mean 'embed_dim'"),
        (ENCODER, {"input_shape": (3, 0)}, "input_shape=3,0: .* above 0, not of 0"),
        (ENCODER, {"input_shape": "3x5"}, "not of '3x5'"),
        (ENCODER, {"input_shape": (3, 5), "input_dtype": "float"}, "did you mean 'float32'"),
        (f"{HERE}:Named", {"input_shape": (3, 5)}, "with --set sample_shape=3,32,32"),
    ],
)
def test_a_wrong_spec_is_refused(spec: str, arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        package_model(spec, arguments)


def test_a_constructor_gets_an_input_shape_of_its_own() -> None:
    """If the shape of a sample is given by its other name."""
    arguments = {"sample_shape": (3, 5), "input_shape": 5}
    model = package_model(f"{HERE}:Named", arguments)
    assert model.input_shape == (3, 5)
    assert model.arguments["input_shape"] == 5
    assert calls(discover_axes(model))["width"] == "cut.width('width', 8)"


def test_a_slice_is_the_smaller_model_of_the_package() -> None:
    """The narrower build is the class with smaller arguments, and returns its logits."""
    discovery = discover_axes(encoder())
    sizes: dict[str, int] = {}
    for form in discovery.forms:
        sizes |= form.sizes(Cut(0.5, 1))
    built = encoder().build(sizes).eval()
    own = Encoder(5, embed_dim=6, num_heads=3, hidden=5, depth=1).eval()
    own.load_state_dict(built.state_dict())
    x = torch.randn(2, 3, 5)
    assert torch.equal(built(x), own(x)["logits"])


def test_a_written_builder_exports_the_same_graphs(tmp_path: Path) -> None:
    """A file for --models has the same digests as the SPEC."""
    arguments = {"input_shape": (3, 5), "depth": 1}
    model = package_model(ENCODER, arguments)
    forms = discover_axes(model).forms
    path = tmp_path / "my_models.py"
    write_builder(path, model, arguments, forms)
    with pytest.raises(ConfigError, match="exists"):
        write_builder(path, model, arguments, forms)
    written = Registry.from_architectures([]).with_file(path).get("encoder")
    digests = []
    for number, arch in enumerate((architecture_of(model, forms), written)):
        layout = infer_layout(arch)
        out = tmp_path / str(number)
        recipe = Recipe.from_table(RecipeTable(), {})
        export_architecture(
            ExportRequest(arch, {}, [layout.tier(0.5)], recipe),
            out,
            ExportOptions(formats=["onnx"]),
        )
        manifest = json.loads((out / "encoder" / "w0.50-d1" / "manifest.json").read_bytes())
        digests.append(manifest["graphs"])
    assert digests[0] == digests[1]
    assert len(digests[0]) > 1


def test_sizes_are_found_in_nested_arguments() -> None:
    """Lists, tuples and objects are walked; a copy is changed."""
    arguments = {"dims": (40, [80, 1]), "drop": 0.1, "config": {"layers": 2, "biased": True}}
    assert sizes_of(arguments) == {"dims.0": 40, "dims.1.0": 80, "config.layers": 2}
    assert with_sizes(arguments, {"dims.1.0": 60})["dims"] == (40, [60, 1])
    assert arguments["dims"] == (40, [80, 1])
    with pytest.raises(ConfigError, match="did you mean 'layers'"):
        with_sizes(arguments, {"config.layer": 3})


def test_forms_ask_a_cut() -> None:
    assert heads_form("dim", 12, 3).sizes(Cut(0.5)) == {"dim": 6}
    assert groups_form({"heads": 4, "dim": 64}, 4).sizes(Cut(0.5)) == {"heads": 2, "dim": 32}


class _Scored(nn.Module):
    """Mixes tokens by scores, to which it adds the mask that it makes of one per token."""

    def __init__(self, *, causal: bool, window: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.causal = causal
        self.window = window  # tokens that each sees before it; 0 for all

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        scores = x @ x.transpose(1, 2)
        if attention_mask.dim() == 4:
            scores = scores + attention_mask[:, 0]
        else:
            scores = scores.masked_fill(attention_mask[:, None, :] == 0, -1e30)
            hidden = torch.full(scores.shape[1:], -1e30)
            if self.causal:
                scores = scores + hidden.triu(1)
            if self.window:
                scores = scores + hidden.tril(-self.window)
        mixed: torch.Tensor = scores.softmax(-1) @ x
        return mixed


@pytest.mark.parametrize(("causal", "mask"), [(False, "scores"), (True, "causal")])
def test_the_mask_that_hides_the_same_is_chosen(causal: bool, mask: str) -> None:
    """It is compared with the mask that the model makes itself, on texts with padding."""
    module = _Scored(causal=causal)
    call = choose_mask(module, PackageCall("input_ids", padding=0), 9, 8)
    assert call.mask == mask


@pytest.mark.parametrize(("length", "mask"), [(8, "causal"), (16, "padding"), (2, "causal")])
def test_the_mask_is_chosen_on_samples_of_their_length(length: int, mask: str) -> None:
    """A window of 12 tokens hides nothing in shorter texts, and no other mask hides it."""
    module = _Scored(causal=True, window=12)
    call = choose_mask(module, PackageCall("input_ids", padding=0), 9, length)
    assert call.mask == mask


def test_samples_of_another_length_get_another_call() -> None:
    """It is chosen again, and only then."""
    chosen: list[tuple[int, ...] | None] = []

    def choose(model: PackageModel) -> PackageCall:
        chosen.append(model.input_shape)
        return PackageCall("input_ids", mask="causal")

    model = PackageModel("", "x", nn.Linear, {}, input_shape=(8,), choose_call=choose)
    assert model.for_samples((8,)) is model
    longer = model.for_samples(16)
    assert longer.input_shape == (16,)
    assert longer.call.mask == "causal"
    assert chosen == [(16,)]


def test_the_logits_of_an_output_are_taken() -> None:
    """Of several outputs the one that is named, else the logits, else the only one."""
    x = torch.zeros(1, 3, 5)
    assert adapt_call(Encoder())(x).shape == (1, 4)
    assert adapt_call(Encoder(), output=PackageOutput("tokens"))(x).shape == (1, 3, 5)
    with pytest.raises(ConfigError, match="there are logits, tokens"):
        adapt_call(Encoder(), output=PackageOutput("hidden"))(x)
