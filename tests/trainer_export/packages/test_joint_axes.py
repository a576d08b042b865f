"""Arguments that hold only together are found as one axis: lists, equal sizes and shared heads."""

from typing import Any

import pytest

from models.cut import Cut
from models.zoo.conversion_plan import convert_where_needed
from models.zoo.inference import infer_layout
from tests.trainer_export.packages.small_models import Refusing
from trainer_export.packages.axis_forms import (
    AxisForm,
    groups_form,
    name_of,
    parse_pins,
    width_form,
)
from trainer_export.packages.builder import architecture_of
from trainer_export.packages.candidates import (
    alike_sets,
    head_sets,
    joint_form,
    shared_head_sets,
    usual_assignments,
)
from trainer_export.packages.discovery import discover_axes
from trainer_export.packages.loading import package_model
from trainer_export.packages.package_model import PackageModel
from trainer_export.packages.search_record import Discovery
from trainer_export.packages.survey import OTHER_LAYERS, Effect, Surveyed

HERE = "tests.trainer_export.packages.small_models"


def discover(name: str, shape: tuple[int, ...] = (4,), **arguments: Any) -> Discovery:
    return discover_axes(package_model(f"{HERE}:{name}", {"input_shape": shape, **arguments}))


def calls(discovery: Discovery) -> dict[str, str]:
    return {"+".join(f.places): f.form.call for f in discovery.findings if f.form}


def test_equal_sizes_of_a_list_are_one_axis() -> None:
    """Where the outputs of two layers are added; the third width is an axis of its own."""
    discovery = discover("Stages")
    assert calls(discovery) == {
        "num_classes": "cut.classes(classes)",
        "widths.0+widths.1": "cut.groups('widths.0', 8)",
        "widths.2": "cut.width('widths.2', 12)",
    }
    sizes = discovery.forms[1].sizes(Cut(0.5))
    assert sizes == {"widths.0": 4, "widths.1": 4}


def test_the_entries_of_a_list_are_scaled_together() -> None:
    """None of them takes another number without the others."""
    assert calls(discover("Tapering"))["widths.0+widths.1"] == "cut.groups('widths', 8)"


def test_the_extent_of_a_kernel_is_no_size_of_a_layer() -> None:
    """So it does not keep the stages from being scaled together, of which each has its heads."""
    discovery = discover("Reducing", (3, 8, 8))
    assert calls(discovery)["widths.0+widths.1+widths.2"] == "cut.groups('widths', 4)"
    reasons = {finding.places[0]: finding.reason for finding in discovery.findings}
    assert reasons["ratios.0"] == Effect.KERNEL.value


def test_query_heads_keep_their_number_for_each_key_head() -> None:
    """One axis cuts both, so that the same path is taken at every width."""
    discovery = discover("Grouped", (3, 5))
    assert calls(discovery)["num_heads+num_key_heads"] == "cut.groups('num_heads', 2)"
    assert calls(discovery)["hidden_size"] == "cut.width('hidden_size', 6)"
    sizes: dict[str, int] = {}
    for form in discovery.forms:
        sizes |= form.sizes(Cut(0.25))
    assert sizes["num_heads"] == 2
    assert sizes["num_key_heads"] == 1


def test_twice_a_width_that_is_another_width() -> None:
    """No layer fits two equal widths, which says nothing about the widths themselves."""
    found = calls(discover("Fitted", (5,)))
    assert found["widths.0"] == "cut.width('widths.0', 8)"
    assert found["widths.1"] == "cut.width('widths.1', 16)"


def test_axes_that_build_another_model_at_some_width_are_not_taken_together() -> None:
    """A quarter of both sizes would leave out a layer."""
    model = package_model(f"{HERE}:Projected", {"input_shape": (5,)})
    # Otherwise the layers would be cut together.
    discovery = discover_axes(model, parse_pins(["layer_parts=off"], model.sizes))
    assert [form.kind for form in discovery.forms].count("width") == 1
    reasons = [finding.reason for finding in discovery.findings]
    assert any("other layers are built at width 0.25" in reason for reason in reasons)


def test_a_size_of_which_a_layer_has_half_is_cut_in_pairs() -> None:
    assert calls(discover("Halving"))["width"] == "cut.groups('width', 8)"


def test_a_norm_of_groups_is_cut_by_whole_groups() -> None:
    """A width that the constructor refuses is no axis, even if permuting its units proves it."""
    found = calls(discover("Normed", width=32))
    assert found["width"] in {"cut.groups('width', 4)", "cut.groups('width', 8)"}


def test_a_function_that_makes_a_sequence_is_built_anew() -> None:
    """Its own arguments are the sizes, because a sequence takes layers."""
    assert calls(discover("stack"))["width"] == "cut.width('width', 8)"


def test_an_argument_that_takes_an_object_is_given_by_fields() -> None:
    """Of the class that its type names, with the defaults of the others."""
    arguments = {"input_shape": (4,), "sizes.hidden": 10}
    model = package_model(f"{HERE}:Positions", arguments)
    assert model.sizes == {
        "sizes.table": 6,
        "sizes.hidden": 10,
        "num_classes": 3,
        "layer_parts": 8,
        "layer_quarters": 4,
    }
    built = model.build({"sizes.hidden": 5})
    assert built.get_submodule("second").weight.shape == (5, 6)


def entry(place: str, size: int, effect: Effect = Effect.WIDTH) -> Surveyed:
    return Surveyed(place, size, effect)


def test_rounded_sizes_are_scaled_by_what_they_are_rounded_to() -> None:
    rounded = (entry("a", 16, Effect.ROUNDED), entry("b", 48, Effect.ROUNDED))
    form = joint_form(rounded)
    assert form is not None
    assert form.sizes(Cut(0.5)) == {"a": 8, "b": 24}
    assert joint_form((entry("a", 4), entry("b", 9))) is None


def test_streams_of_heads_are_at_last_cut_by_whole_heads() -> None:
    """With the number of heads, as where the dimensions of a head have fixed places."""
    stream = Surveyed("hidden_size", 64, Effect.WIDTH, "is no multiple of 4 heads")
    heads = [entry("num_heads", 4, Effect.REFUSED)]
    *_, last = usual_assignments([stream, entry("hidden", 96)], heads)
    whole = [width_form("hidden", 96), groups_form({"num_heads": 4, "hidden_size": 64}, 4)]
    assert last == whole
    # The number of heads may change sizes by itself, and is cut once all the same.
    movable = [stream, entry("hidden", 96), entry("num_heads", 4)]
    *_, last = usual_assignments(movable, [entry("num_heads", 4)])
    assert last == whole


def test_sizes_that_are_refused_apart_are_tried_if_the_others_cut_little() -> None:
    """As in Mamba 2, where the stream has to be the number of heads times their size."""
    sizes = {"hidden": 16, "num_heads": 4, "head_dim": 4, "inner": 4, "num_classes": 3}
    # As a model of transformers, whose layers are not cut together.
    model = PackageModel("", "x", Refusing, sizes, "num_classes", (4,))
    assert calls(discover_axes(model)) == {
        "num_classes": "cut.classes(classes)",
        "inner": "cut.width('inner', 4)",
        "num_heads+hidden": "cut.groups('num_heads', 4)",
    }


def test_an_axis_that_holds_in_few_blocks_only_stays_whole() -> None:
    """Discovery leaves blocks out, so it proves the whole model if these differ from the others."""
    discovery = discover("Following")
    (finding,) = (found for found in discovery.findings if found.places == ("width",))
    assert finding.form is None
    assert "holds in trials, but not in the proof" in finding.reason
    assert discovery.layout is not None


def test_a_number_that_adds_layers_is_not_tried_as_a_width() -> None:
    """It also changes the sizes of other layers, as the repeated layers of DenseNet do."""
    discovery = discover("Repeated", (5,))
    assert calls(discovery) == {
        "num_classes": "cut.classes(classes)",
        "growth": "cut.width('growth', 6)",
    }
    (finding,) = (found for found in discovery.findings if found.places == ("repeats",))
    assert "other layers are built" in finding.reason


def test_an_axis_that_holds_for_usual_values_only_stays_whole() -> None:
    """Trials have usual values; the proof also has those that the model compares with."""
    discovery = discover("Threshold")
    (finding,) = (found for found in discovery.findings if found.places == ("width",))
    assert finding.form is None
    assert "not interchangeable" in finding.reason


def test_discovery_returns_the_layout_that_an_export_would_prove() -> None:
    model = package_model(f"{HERE}:Following", {"input_shape": (4,), "is_placed": False})
    discovery = discover_axes(model)
    assert calls(discovery)["width"] == "cut.width('width', 8)"
    arch, _ = convert_where_needed(architecture_of(model, discovery.forms), {})
    assert discovery.layout == infer_layout(arch)


def test_a_number_of_labels_that_moves_no_parameter_is_none() -> None:
    discovery = discover("Unlabelled")
    assert calls(discovery) == {"width": "cut.width('width', 8)"}
    (finding,) = (found for found in discovery.findings if found.places == ("num_classes",))
    assert "not labels" in finding.reason


def test_all_numbers_of_heads_are_tried_before_each() -> None:
    """A stream that consists of heads is tried with all of them, too."""
    entries = (entry("num_heads", 4), entry("num_key_heads", 2), entry("hidden_size", 32))
    shared = [tuple(e.place for e in joint) for joint in shared_head_sets(entries)]
    assert shared == [
        ("num_heads", "num_key_heads"),
        ("num_heads", "num_key_heads", "hidden_size"),
    ]
    assert not [*shared_head_sets(entries[1:])]
    assert [entry.place for entry in next(head_sets(entries))] == ["num_heads"]


@pytest.mark.parametrize(
    ("sizes", "sets"),
    [
        ({"a": 8, "b": 8, "c": 4}, [("a", "b")]),
        ({"dims.0": 8, "dims.1": 16, "c": 4}, [("dims.0", "dims.1")]),
        ({"a": 8, "b": 4}, []),
    ],
)
def test_equal_sizes_and_lists_are_alike(sizes: dict[str, int], sets: list[object]) -> None:
    entries = [entry(place, size) for place, size in sizes.items()]
    assert [tuple(e.place for e in joint) for joint in alike_sets(entries)] == sets


def test_equal_streams_of_heads_are_one_axis() -> None:
    """As in DeBERTa, where the pooler has the size of the stream, whose heads refuse one more."""
    movable = [
        Surveyed("hidden", 64, Effect.WIDTH, "not a multiple of the heads"),
        Surveyed("pooled", 64, Effect.WIDTH),
        Surveyed("inner", 96, Effect.WIDTH),
    ]
    heads = [Surveyed("num_heads", 4, Effect.REFUSED, "does not divide the stream")]
    joint = AxisForm("hidden", "heads", 64, 4, {"hidden": 4, "pooled": 4})
    assert [joint, width_form("inner", 96)] in [*usual_assignments(movable, heads)]


def test_equal_sizes_that_layers_are_fitted_to_are_scaled_by_units() -> None:
    """One more of both builds no other layers, so their heads need not be kept."""
    movable = [
        Surveyed("widths.0", 16, Effect.WIDTH, OTHER_LAYERS),
        Surveyed("widths.1", 16, Effect.WIDTH, OTHER_LAYERS),
    ]
    heads = [Surveyed("num_heads", 4, Effect.NONE)]
    _apart, together, *_ = usual_assignments(movable, heads)
    assert together == [groups_form({"widths.0": 16, "widths.1": 16}, 16)]


def test_a_stream_that_changes_only_with_its_heads_is_tried_with_them() -> None:
    """As in Mamba 2, whose configuration refuses another number of either."""
    number = Surveyed("num_heads", 8, Effect.REFUSED, "times their size is not the stream")
    stream = Surveyed("hidden", 32, Effect.REFUSED, "is not the size of all heads")
    assert (number, stream) in [*head_sets([number, stream])]


@pytest.mark.parametrize(
    ("places", "name"),
    [
        (["text_config.num_heads", "vision_config.num_heads"], "num_heads"),
        (["text_config.num_heads", "text_config.hidden_size"], "text_config.num_heads"),
        (["num_heads", "text_config.num_heads"], "num_heads"),
        (["dims.0", "dims.2"], "dims.0"),
        (["dims.0", "hidden.0"], "dims.0"),
    ],
)
def test_an_axis_of_several_parts_is_named_after_none_of_them(places: list[str], name: str) -> None:
    """As in CLIP, where one axis moves the part for texts and the part for pictures."""
    assert name_of(places) == name
    assert groups_form(dict.fromkeys(places, 4), 2).name == name
