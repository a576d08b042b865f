"""Plans of whole models: depth prefixes, tied and untied draws; layouts as files."""

import json
from dataclasses import replace

import numpy as np
import pytest

from fleet_protocol.errors import ConfigError, PlanError
from models import Axis, AxisKind, Dim, Layout, Statistic, Tier, Window, make_plan, slice_weights
from tests.models.layouts import make_layout, noise, scatter, square, zeros


def encoder(depth: int = 3) -> Layout:
    """A residual stream through blocks of two layers, with an embedding below and a classifier on
    top.
    """
    axes = [
        Axis("vocab", 5, AxisKind.FIXED),
        Axis("embed", 16),
        Axis("classes", 3, AxisKind.FIXED),
        *(Axis(f"block{number}.ffn", 20) for number in range(1, depth + 1)),
    ]
    tensors = {"embedding": (Dim("vocab"), Dim("embed"))}
    blocks = {"embedding": "stem"}
    for number in range(1, depth + 1):
        own = {
            f"{number}.up": (Dim(f"block{number}.ffn"), Dim("embed")),
            f"{number}.up_bias": (Dim(f"block{number}.ffn"),),
            f"{number}.down": (Dim("embed"), Dim(f"block{number}.ffn")),
            f"{number}.norm": (Dim("embed"),),
        }
        tensors |= own
        blocks |= dict.fromkeys(own, f"block{number}")
    tensors["head"] = (Dim("classes"), Dim("embed"))
    return make_layout(axes, tensors, blocks=blocks, depth=depth, label_axes=("classes",))


def test_a_depth_keeps_the_lowest_blocks_the_stem_and_the_head():
    """A shallow model is a prefix of the deep one with the same head."""
    layout = encoder()
    plan = make_plan(layout, layout.tier(1.0, 2))
    assert plan.blocks == {"stem", "block1", "block2", "head"}
    weights = noise(layout)
    cut = slice_weights(layout, plan, weights)
    assert weights.keys() - cut.keys() == {"3.up", "3.up_bias", "3.down", "3.norm"}
    for name, value in cut.items():
        np.testing.assert_array_equal(value, weights[name])


def test_width_and_depth_are_cut_together():
    """A tier of half width and one block has the halves of the first block alone; the rest is left
    as it was.
    """
    layout = encoder()
    tier = layout.tier(0.5, 1)
    shapes = {
        "embedding": (5, 8),
        "1.up": (10, 8),
        "1.up_bias": (10,),
        "1.down": (8, 10),
        "1.norm": (8,),
    }
    assert layout.shapes(tier) == {**shapes, "head": (3, 8)}
    assert layout.parameter_count(tier) == 5 * 8 + 2 * 80 + 10 + 8 + 24
    plan = make_plan(layout, tier, "rolling", round_index=9)
    weights = noise(layout)
    merged = scatter(
        layout,
        plan,
        {name: value * 0 for name, value in slice_weights(layout, plan, weights).items()},
        weights,
    )
    np.testing.assert_array_equal(merged["2.up"], weights["2.up"])
    assert (merged["1.norm"] == 0).sum() == 8


def test_a_tied_draw_lines_the_residual_stream_up():
    """All layers on one axis keep the same units."""
    layout = encoder()
    plan = make_plan(layout, layout.tier(0.5), "random", seed=4)
    assert not plan.overrides
    assert [*plan.indices] == ["embed", "block1.ffn", "block2.ffn", "block3.ffn"]


def test_a_draw_per_layer_chains_outputs_into_inputs():
    """Each layer draws its outputs; its bias, and the inputs of the next, follow the last draw on
    that axis.
    """
    layout = encoder()
    plan = make_plan(layout, layout.tier(0.5), Window("random", draw="per_layer"), seed=4)
    units = {key[:2]: list(value) for key, value in plan.overrides.items()}
    assert units["embedding", 1] == units["1.up", 1]
    assert units["1.up", 0] == units["1.up_bias", 0] == units["1.down", 1]
    assert units["1.down", 0] == units["1.norm", 0] == units["2.up", 1]
    assert units["3.down", 0] == units["head", 1]
    streams = {
        tuple(units[name, at])
        for name, at in [("embedding", 1), *((f"{n}.down", 0) for n in (1, 2, 3))]
    }
    assert len(streams) == 4


def test_statistics_follow_the_draw_of_their_layer():
    """The running mean of a norm keeps the units that the norm's weight keeps, not those of the
    axis.
    """
    layout = make_layout(
        [Axis("in", 2, AxisKind.FIXED), Axis("a", 32)],
        {"layer": (Dim("a"), Dim("in")), "norm.weight": (Dim("a"),)},
        statistics=(Statistic("norm", (Dim("a"),), "head"),),
    )
    plan = make_plan(layout, layout.tier(0.5), Window("random", draw="per_layer"))
    drawn = plan.overrides["norm.weight", 0, "a"]
    assert list(drawn) != list(plan.indices["a"])
    numbers = np.arange(32, dtype=np.float32)
    weights = {"layer": np.zeros((32, 2)), "norm.weight": numbers, "stat.norm.mean": numbers}
    cut = slice_weights(layout, plan, weights)
    np.testing.assert_array_equal(cut["norm.weight"], drawn)
    np.testing.assert_array_equal(cut["stat.norm.mean"], drawn)


def test_a_draw_per_layer_draws_each_embedding_but_never_in_front_of_the_classifier():
    """Token and position tables keep different columns, as released; a classifier takes what flows
    into it.
    """
    axes = [Axis("rows", 5, AxisKind.FIXED), Axis("embed", 16)]
    table = (Dim("rows"), Dim("embed"))
    layout = make_layout(
        axes,
        {"tokens": table, "positions": table, "head": table},
        blocks={"tokens": "stem", "positions": "stem"},
    )
    units = make_plan(
        layout, layout.tier(0.5), Window("random", draw="per_layer"), seed=4
    ).overrides
    assert list(units["tokens", 1, "embed"]) != list(units["positions", 1, "embed"])
    assert list(units["positions", 1, "embed"]) == list(units["head", 1, "embed"])


def test_a_plan_is_frozen():
    """Nobody can move the units of a plan that others hold."""
    plan = make_plan(square(4), Tier(0.5))
    with pytest.raises(ValueError, match="read-only"):
        plan.indices["k"][0] = 3
    with pytest.raises(TypeError):
        plan.indices["k"] = np.arange(2)
    drawn = make_plan(encoder(), Tier(0.5, 1), Window("random", draw="per_layer"))
    with pytest.raises(TypeError):
        drawn.overrides["head", 1, "embed"] = np.arange(2)
    with pytest.raises(ValueError, match="read-only"):
        drawn.overrides["head", 1, "embed"][0] = 3


def test_a_plan_of_nothing_else_is_that_of_the_first_round_and_seed_0():
    """What is left out is round 0, seed 0, a step of 1 upwards, a tied draw, whole heads; the plan
    tells its kind.
    """
    rolled = make_plan(attention(), Tier(0.5, 1), "rolling")
    assert list(rolled.indices["heads"]) == [0, 1, 4, 5]
    assert list(make_plan(square(4), Tier(0.5), "rolling", round_index=1).indices["k"]) == [1, 2]
    drawn, first = (
        make_plan(square(64), Tier(0.5), "random", **seed) for seed in ({}, {"seed": 0})
    )
    assert list(drawn.indices["k"]) == list(first.indices["k"])
    assert not drawn.overrides
    assert (make_plan(square(4), Tier(0.5)).kind, rolled.kind, drawn.kind) == (
        "static",
        "rolling",
        "random",
    )


def test_units_that_are_not_interchangeable_are_not_exchanged():
    """A leading axis has static plans alone; the message names it and what to do; the file keeps
    the word.
    """
    layout = make_layout([Axis("k", 4, leading=True)], {"w": (Dim("k"),)})
    assert list(make_plan(layout, Tier(0.5)).indices["k"]) == [0, 1]
    for kind in ("rolling", "random"):
        with pytest.raises(
            PlanError, match=rf"axis k was declared leading, so {kind} plans cannot .*heterofl"
        ):
            make_plan(layout, Tier(0.5), kind)
    assert Layout.from_json(layout.to_json()) == layout


def test_groups_that_share_entries_keep_the_same_places():
    """A window that rolls across groups, as released code does, has no meaning for the inputs of a
    grouped layer.
    """
    layout = make_layout([Axis("k", 4, groups=2)], {"w": (Dim("k"), Dim("k", shared=True))})
    shapes = {
        name: value.shape
        for name, value in slice_weights(
            layout, make_plan(layout, Tier(0.5)), zeros(layout)
        ).items()
    }
    assert shapes == {"w": (2, 1)}
    plan = make_plan(layout, Tier(0.5), Window(heads="as_released"), round_index=2)
    with pytest.raises(PlanError, match=r"its 2 groups share entries.*preserving"):
        slice_weights(layout, plan, zeros(layout))


def test_an_arranged_dimension_survives_its_file_and_says_what_it_is():
    """Plain dimensions are written as before, others as their loops."""
    arranged = Dim("a", 2, 3, more=(Dim("k", outer=3), Dim("k", shared=True), Dim("fixed.2")))
    axes = [Axis("a", 3), Axis("k", 4, groups=2), Axis("fixed.2", 2, AxisKind.FIXED)]
    layout = make_layout(axes, {"w": (arranged, Dim("a", 5))})
    assert layout.parameters[0].shape == (3 * 2 * 3 + 3 * 4 + 2 + 2, 15)
    assert Layout.from_json(layout.to_json()) == layout
    assert [str(dim) for dim in layout.parameters[0].dims] == [
        "3*a*2 + 3*k + k/group + fixed.2",
        "a*5",
    ]
    assert Dim("a", 5).to_json() == ["a", 5]


def test_rows_of_labels_stand_alone():
    """The label rule chooses rows of a whole dimension."""
    axes = [Axis("labels", 3, AxisKind.FIXED), Axis("a", 2)]
    with pytest.raises(
        PlanError,
        match="w mixes rows of labels with others; put the rows of labels into a separate tensor",
    ):
        make_layout(axes, {"w": (Dim("a", more=(Dim("labels"),)),)}, label_axes=("labels",))


def test_a_rolling_step_is_a_multiple_of_the_round():
    """With a step of 3 the window of round 2 starts at unit 6."""
    plan = make_plan(square(8), Tier(0.5), Window(step=3), round_index=2)
    assert list(plan.indices["k"]) == [6, 7, 0, 1]


def attention() -> Layout:
    """Two heads of four units: a projection into them, one out of them that holds two entries for
    each unit.
    """
    axes = [Axis("embed", 4), Axis("heads", 8, groups=2)]
    return make_layout(
        axes, {"query": (Dim("heads"), Dim("embed")), "out": (Dim("embed"), Dim("heads", 2))}
    )


@pytest.mark.parametrize(
    ("options", "units"),
    [
        ({}, [3, 0, 7, 4]),
        ({"step": 2}, [2, 3, 6, 7]),
        ({"direction": "down"}, [1, 2, 5, 6]),
        ({"heads": "as_released"}, [3, 4, 7, 0]),
    ],
)
def test_a_rolling_plan_moves_the_units_of_each_head_in_their_order(options, units):
    """In round 3 the window starts at unit 3 of each head; what is cut, and written back, comes in
    that order.
    """
    layout = attention()
    plan = make_plan(layout, layout.tier(0.5), Window("rolling", **options), round_index=3)
    assert list(plan.indices["heads"]) == units
    weights = noise(layout)
    embed = plan.indices["embed"]
    entries = [2 * unit + spot for unit in units for spot in range(2)]
    cut = slice_weights(layout, plan, weights)
    np.testing.assert_array_equal(cut["query"], weights["query"][np.ix_(units, embed)])
    np.testing.assert_array_equal(cut["out"], weights["out"][np.ix_(embed, entries)])
    numbered = {
        name: np.arange(value.size, dtype=np.float32).reshape(value.shape)
        for name, value in cut.items()
    }
    merged = scatter(layout, plan, numbered, weights)
    np.testing.assert_array_equal(merged["query"][np.ix_(units, embed)], numbered["query"])
    np.testing.assert_array_equal(merged["out"][np.ix_(embed, entries)], numbered["out"])


@pytest.mark.parametrize("depth", [0, 4, -1])
def test_an_unknown_depth_is_refused_by_name(depth):
    """The message lists the depths there are."""
    with pytest.raises(
        PlanError, match=rf"by_hand has no sub-model of depth {depth}; its depths are 1, 2, 3"
    ):
        encoder().tier(0.5, depth)


def test_a_tier_of_another_model_is_refused():
    """A plan checks the depth of a tier that was made elsewhere."""
    with pytest.raises(PlanError, match="depth 7"):
        make_plan(encoder(), Tier(0.5, 7))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"round_index": -1}, "round_index >= 0"),
        ({"seed": -1}, "seed >= 0"),
        (
            {"window": "spiral"},
            "unknown kind of plan 'spiral'; choose one of static, rolling, random",
        ),
    ],
)
def test_bad_options_of_a_plan_are_refused(options, message):
    """Each message names the option and what it may be."""
    with pytest.raises(PlanError, match=message):
        make_plan(square(4), Tier(0.5), **options)


def test_a_layout_survives_its_file():
    """layout.json holds everything, settings with nested lists included."""
    layout = encoder()
    again = Layout.from_json(layout.to_json())
    assert again == layout
    assert again.settings == {"sizes": (1, (2, 3))}
    assert json.loads(layout.to_json())["version"] == 1


def test_a_tier_may_have_a_head_of_its_own():
    """Its head has a row for each of its own labels; all else, and every other tier, is as it was;
    a file keeps it.
    """
    plain = encoder()
    small = Tier(1.0, 1)
    middle = Tier(1.0, 2)
    layout = replace(plain, heads={small.id: 7})
    assert layout.shapes(small) == {**plain.shapes(small), "head": (7, 16)}
    assert layout.shapes(middle) == plain.shapes(middle)
    assert (layout.classes_of(small), layout.classes_of(middle)) == (7, plain.classes)
    assert [item.name for item in layout.own_head(small)] == ["head"]
    assert not layout.own_head(middle)
    assert layout.parameter_count(small) == plain.parameter_count(small) + 4 * 16
    assert Layout.from_json(layout.to_json()) == layout
    assert "heads" not in json.loads(plain.to_json())


@pytest.mark.parametrize(
    ("tier", "classes", "message"),
    [
        ("w1.00-d3", 5, "setting `classes`"),
        ("w0.50-d1", 5, "width 1 can"),
        ("w1.00-d1", 0, "with 0 labels"),
        ("w1.00-d9", 5, "no sub-model of depth 9"),
        ("small", 5, "not a tier id"),
    ],
)
def test_a_head_that_makes_no_sense_is_refused(tier, classes, message):
    """The whole model has its head already; narrow heads would be cut, which nobody can merge."""
    with pytest.raises(PlanError, match=message):
        replace(encoder(), heads={tier: classes})


def test_labels_below_the_head_cannot_be_a_tiers_own():
    """A token embedding with a row for each label is shared by every tier."""
    with pytest.raises(
        PlanError, match="embedding depends on the labels but is not part of a trainable head"
    ):
        replace(encoder(), label_axes=("classes", "vocab"), heads={"w1.00-d1": 7})


@pytest.mark.parametrize(
    "damage",
    [
        lambda document: document.update(version=2),
        lambda document: document.pop("axes"),
        lambda document: document["axes"][1].update(size=17),
        lambda document: document["parameters"][0].update(block="attic"),
        lambda document: document["parameters"][0].update(dims=[["vocab", 1], ["width", 1]]),
        lambda document: document.update(label_axes=["embed"]),
        lambda document: document.update(depths=[1, 2]),
        lambda document: document.update(input_dtype="float16"),
        lambda document: document["parameters"].append(document["parameters"][0]),
        lambda document: document.update(heads={"w1.00-d3": 4}),
    ],
)
def test_a_damaged_layout_is_refused(damage):
    """A file that contradicts itself is found when it is read, not when a model is cut by it."""
    document = json.loads(encoder().to_json())
    damage(document)
    with pytest.raises(ConfigError, match=r"layout.json cannot be read"):
        Layout.from_json(json.dumps(document))


def _with_axes(document, count, size):
    for number in range(count):
        axis = {"name": f"unused{number}", "size": size, "kind": "fixed", "groups": 1}
        document["axes"].append({**axis, "leading": False})


def _with_statistic(document, inner):
    axis = document["axes"][0]["name"]
    statistic = {"name": "norm", "dims": [[axis, inner]], "block": "head"}
    document["statistics"].append(statistic)


@pytest.mark.attack(
    "file",
    "A layout declares sizes for which a server would allocate terabytes",
    "refused before anything is allocated; the error names the axis or tensor",
    "2026-11-28",
)
@pytest.mark.parametrize(
    ("bomb", "message"),
    [
        (lambda document: _with_axes(document, 1, 2**40), "no model has more than"),
        (lambda document: _with_axes(document, 100, 2**24), "its axes have"),
        (lambda document: _with_statistic(document, 2**50), "a dimension of norm"),
        (lambda document: _with_statistic(document, -3), "from 1 on"),
    ],
)
def test_a_layout_of_terabytes_is_refused(bomb, message):
    """Its plans list the units of each axis, also of one that no tensor has."""
    document = json.loads(encoder().to_json())
    bomb(document)
    with pytest.raises(ConfigError, match=message):
        Layout.from_json(json.dumps(document))


@pytest.mark.attack(
    "file",
    "A layout is nested more deeply than a JSON parser can read",
    "refused as damaged",
    "2026-11-28",
)
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_a_layout_of_nested_brackets_is_refused(opening):
    """As any other damage; a parser of JSON goes as deep as the text does, and then no further."""
    with pytest.raises(ConfigError, match=r"layout.json cannot be read"):
        Layout.from_json(opening * 100_000)


@pytest.mark.parametrize(
    "name",
    ["\x1b[2J", "a\nb", "\u202egpj", "a" * 30_000],
    ids=["an escape", "a line end", "a mark", "endless"],
)
@pytest.mark.parametrize(
    "rename",
    [
        lambda document, name: document.update(arch=name),
        lambda document, name: document["parameters"][0].update(name=name),
        lambda document, name: document["axes"][0].update(name=name),
    ],
    ids=["architecture", "parameter", "axis"],
)
def test_a_layout_has_plain_names(rename, name):
    """What a stranger calls an architecture or a tensor is short, and moves no cursor; the refusal
    shows it safely.
    """
    document = json.loads(encoder().to_json())
    rename(document, name)
    with pytest.raises(ConfigError, match=r"control characters|too long") as caught:
        Layout.from_json(json.dumps(document))
    assert str(caught.value).isprintable()


def test_text_that_is_no_json_is_refused():
    """Half a file is no layout."""
    with pytest.raises(ConfigError, match="export the architecture again"):
        Layout.from_json(encoder().to_json()[:100])
