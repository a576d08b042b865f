"""The label rule, held by every strategy that has it: a row of the output layer belongs to the
devices with its label.

Three devices whose updates are one number everywhere: ``wide`` trains the whole model on labels 0
and 1, ``narrow`` its half on label 1, ``other`` the whole on label 3. Nobody has seen label 2.
``blind`` has no labels at all.
"""

from dataclasses import replace

import numpy as np
import pytest

from broker_server.strategies.strategy import Contribution
from fleet_protocol.messages import TaskMetrics
from models.axes import Axis, AxisKind
from models.plan import compile_plan, make_plan
from models.registry import Registry, infer_layout
from tests.broker_server.artifacts import tiny_layout, tiny_weights
from tests.broker_server.merging import layout_of
from tests.broker_server.methods import built, merged

LAYOUT = tiny_layout(inputs=5, hidden=6)
HALF = 3
WIDE = 1.0
NARROW = 4.0
OTHER = 7.0
FLEET = (
    ("narrow", 0.5, NARROW, (1,), 1),
    ("other", 1.0, OTHER, (3,), 5),
    ("wide", 1.0, WIDE, (0, 1), 2),
)
WITH_THE_RULE = ("heterofl", "fedrolex", "whalefl", "fedmedian")


def contribution(device, width, value, labels, examples, layout=LAYOUT) -> Contribution:
    """An update that is `value` in every entry its device holds."""
    plan = compile_plan(layout, make_plan(layout, layout.tier(width)))
    weights = {
        name: np.full(plan.tensors[name].local_shape, value, np.float32) for name in plan.required
    }
    metrics = TaskMetrics(
        examples=examples,
        batches=1,
        labels=labels,
        fetch_seconds=0,
        train_seconds=0,
        resident_bytes=0,
    )
    return Contribution(device, layout.tier(width), plan.title, plan, weights, metrics)


def after(config, *fleet):
    """The weights after a round of these devices, and those before it."""
    old = tiny_weights(LAYOUT)
    return merged(built(config, LAYOUT), [contribution(*device) for device in fleet], old), old


@pytest.mark.parametrize("name", WITH_THE_RULE)
def test_a_row_is_merged_from_those_who_hold_its_label(name):
    """Held by one it is theirs, by two their mean where both hold the entry, by nobody it keeps its
    bits.
    """
    new, old = after({"name": name}, *FLEET)
    for head in ("head.weight", "head.bias"):
        np.testing.assert_array_equal(new[head][0], np.full_like(old[head][0], WIDE))
        np.testing.assert_array_equal(new[head][2], old[head][2])
        np.testing.assert_array_equal(new[head][3], np.full_like(old[head][3], OTHER))
    np.testing.assert_allclose(new["head.weight"][1, :HALF], (WIDE + NARROW) / 2)
    np.testing.assert_allclose(new["head.weight"][1, HALF:], WIDE)
    np.testing.assert_allclose(new["head.bias"][1], (WIDE + NARROW) / 2)


@pytest.mark.parametrize("name", WITH_THE_RULE)
def test_a_row_of_the_embedding_is_of_those_who_hold_its_token(name):
    """Specification 1.7, of every table with a row for each label; the mask symbol's, which
    follows, is nobody's.
    """
    language = {"classes": 6, "embed": 8, "heads": 2, "ffn": 8, "blocks": 1, "input_shape": (4,)}
    layout = infer_layout(Registry.zoo().get("transformer_mlm"), language)
    old = {item.name: np.full(item.shape, 9.0, np.float32) for item in layout.parameters}
    fleet = (("one", 1.0, 1.0, (1, 2), 4), ("two", 1.0, 3.0, (2, 4), 4))
    new = merged(
        built({"name": name}, layout), [contribution(*device, layout) for device in fleet], old
    )
    assert new["tokens.weight"][:, 0].tolist() == [9, 1, 2, 9, 3, 9, 9]
    assert new["head.bias"].tolist() == [9, 1, 2, 9, 3, 9]
    assert (new["positions"] == 2).all()


@pytest.mark.parametrize("name", WITH_THE_RULE)
def test_an_axis_with_fewer_rows_than_labels_has_none(name):
    """Of it every row is taken, by a median as by a mean."""
    layout = layout_of(
        {"emb": ("letters", "h"), "out": ("classes", "h")}, {"letters": 6, "h": 8, "classes": 10}
    )
    axes = {**layout.axes, "letters": Axis("letters", 6, AxisKind.FIXED)}
    layout = replace(layout, axes=axes, label_axes=("letters", "classes"), classes=10)
    old = {item.name: np.full(item.shape, 9.0, np.float32) for item in layout.parameters}
    fleet = (
        ("one", 1.0, 1.0, (1, 9), 4),
        ("two", 1.0, 3.0, (2, 4), 4),
        ("three", 1.0, 3.0, (2, 4), 4),
    )
    new = merged(
        built({"name": name}, layout), [contribution(*device, layout) for device in fleet], old
    )
    assert (new["emb"] == (3 if name == "fedmedian" else np.float32(7 / 3))).all()
    assert new["out"][:, 0].tolist() == [9, 1, 3, 9, 3, 9, 9, 9, 9, 1]


@pytest.mark.parametrize("name", WITH_THE_RULE)
def test_rows_of_other_layers_have_no_labels(name):
    """Below the head everybody who holds an entry counts, whatever labels it has."""
    new, _ = after({"name": name}, *FLEET)
    everybody = 4.0  # the mean and the median of 1, 4 and 7
    for part in (new["hidden.weight"][:HALF], new["hidden.bias"][:HALF]):
        np.testing.assert_allclose(part, everybody)
    for part in (new["hidden.weight"][HALF:], new["hidden.bias"][HALF:]):
        np.testing.assert_allclose(part, (WIDE + OTHER) / 2)


@pytest.mark.parametrize("name", WITH_THE_RULE)
def test_a_device_without_labels_trains_the_body_alone(name):
    """Its update moves every layer but the head, which keeps its bits."""
    new, old = after({"name": name}, ("blind", 1.0, OTHER, (), 3))
    np.testing.assert_array_equal(new["hidden.weight"], np.full_like(old["hidden.weight"], OTHER))
    for head in ("head.weight", "head.bias"):
        np.testing.assert_array_equal(new[head], old[head])


@pytest.mark.parametrize("name", WITH_THE_RULE)
def test_without_the_rule_every_row_is_everybodys(name):
    """Switched off, even the row of a label that nobody has seen is the mean of what the devices
    sent.
    """
    new, _ = after({"name": name, "label_rule": False}, *FLEET)
    np.testing.assert_allclose(new["head.weight"][:, :HALF], (WIDE + NARROW + OTHER) / 3)
    np.testing.assert_allclose(new["head.weight"][:, HALF:], (WIDE + OTHER) / 2)


def test_samples_weigh_among_those_who_hold_the_label():
    """Weighted by samples, a device without the label weighs nothing in its row, however many
    samples it has.
    """
    new, old = after({"name": "heterofl", "weighting": "samples"}, *FLEET)
    np.testing.assert_allclose(new["head.weight"][1, :HALF], (2 * WIDE + 1 * NARROW) / 3)
    np.testing.assert_allclose(new["hidden.bias"][:HALF], (2 * WIDE + 1 * NARROW + 5 * OTHER) / 8)
    np.testing.assert_array_equal(new["head.bias"][2], old["head.bias"][2])


def test_layers_weighed_by_their_width_keep_the_rule():
    """FedRolex' ablation by width: the head is as wide as its rows, so its holders count alike."""
    new, old = after({"name": "fedrolex", "fedrolex": {"weighting": "width"}}, *FLEET)
    np.testing.assert_allclose(new["hidden.bias"][:HALF], (6 * WIDE + 3 * NARROW + 6 * OTHER) / 15)
    np.testing.assert_allclose(new["head.weight"][1, :HALF], (WIDE + NARROW) / 2)
    np.testing.assert_array_equal(new["head.weight"][2], old["head.weight"][2])


def test_averaging_whole_models_has_the_rule_only_on_request():
    """FedAvg takes every row from every device, unless the configuration asks for the rule."""
    fleet = [device for device in FLEET if device[1] == 1.0]
    every = (5 * OTHER + 2 * WIDE) / 7
    new, _ = after({"name": "fedavg"}, *fleet)
    np.testing.assert_allclose(new["head.bias"], every, rtol=1e-6)
    new, old = after({"name": "fedavg", "label_rule": True}, *fleet)
    np.testing.assert_allclose(new["head.bias"][[0, 1, 3]], [WIDE, WIDE, OTHER])
    np.testing.assert_array_equal(new["head.bias"][2], old["head.bias"][2])
    np.testing.assert_allclose(new["hidden.bias"], every, rtol=1e-6)
