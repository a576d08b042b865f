"""Parameters and states written over themselves: only where no order of execution can read one
after it was written.
"""

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from device_runtime.training.backends.session import TrainSession
from fleet_protocol.manifest import next_name, parameter_input, parse_manifest, state_input
from models.registry import Registry, infer_layout
from tests.marking import mostly_slow
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.footprint import peak_memory
from trainer_export.in_place import in_place
from trainer_export.memory_bound import peak_of_step
from trainer_export.recipe import Recipe


def step(*nodes):
    """A graph with one parameter, one state and the gradient ``g``."""
    tensors = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [2])
        for name in ("param.w", "state.w", "g")
    ]
    outputs = [
        helper.make_tensor_value_info(f"next.{name}", TensorProto.FLOAT, [2])
        for name in ("param.w", "state.w")
    ]
    return helper.make_model(
        helper.make_graph([helper.make_node(*node) for node in nodes], "step", tensors, outputs)
    )


UPDATE = ("Sub", ["param.w", "next.state.w"], ["next.param.w"])


@pytest.mark.parametrize(
    ("nodes", "safe"),
    [
        ([("Mul", ["state.w", "g"], ["m"]), ("Add", ["m", "g"], ["next.state.w"]), UPDATE], True),
        ([("Add", ["state.w", "g"], ["next.state.w"]), UPDATE], True),
        ([("Concat", ["state.w"], ["next.state.w"]), UPDATE], False),
        (
            [
                ("Add", ["state.w", "g"], ["next.state.w"]),
                ("Mul", ["state.w", "g"], ["late"]),
                ("Sub", ["param.w", "late"], ["next.param.w"]),
            ],
            False,
        ),
        (
            [
                ("Identity", ["state.w"], ["view"]),
                ("Add", ["state.w", "g"], ["next.state.w"]),
                ("Mul", ["view", "g"], ["late"]),
                ("Sub", ["param.w", "late"], ["next.param.w"]),
            ],
            False,
        ),
    ],
    ids=["read-before", "entry-by-entry", "whole-copy", "read-after", "read-after-through-a-view"],
)
def test_a_state_may_be_overwritten_only_after_its_last_reader(nodes, safe):
    """The flow of data decides, through views as well."""
    assert in_place(step(*nodes), "state.") is safe


@pytest.mark.parametrize(
    ("nodes", "safe"),
    [
        (
            [("Mul", ["param.w", "g"], ["decay"]), ("Sub", ["param.w", "decay"], ["next.param.w"])],
            True,
        ),
        ([("Sub", ["param.w", "g"], ["next.param.w"]), ("Mul", ["param.w", "g"], ["late"])], False),
        ([("Where", ["last", "g", "param.w"], ["next.param.w"])], False),
        ([("Identity", ["param.w"], ["next.param.w"])], False),
    ],
    ids=["read-before", "read-after", "not-entry-by-entry", "handed-on"],
)
def test_a_parameter_may_be_overwritten_only_after_its_last_reader(nodes, safe):
    """A gradient that still needs the old weights may come after their update where nothing else
    orders the two.
    """
    kept = ("Add", ["state.w", "g"], ["next.state.w"])
    assert in_place(step(kept, *nodes), "param.") is safe


def test_the_memory_of_what_is_overwritten_counts_once():
    """Of the three inputs of 8 bytes, two have next values: the step needs 16 bytes for them and
    8 for the gradient's square at different moments, or only the latter if it overwrites both.
    """
    graph = step(
        ("Mul", ["g", "g"], ["square"]),
        ("Add", ["state.w", "square"], ["next.state.w"]),
        ("Sub", ["param.w", "next.state.w"], ["next.param.w"]),
    )
    inputs = 3 * 8
    assert peak_memory(graph) == inputs + 16
    assert peak_memory(graph, in_place=("state.",)) == inputs + 8
    assert peak_of_step(graph) == inputs + 8


@pytest.mark.parametrize("name", mostly_slow(["conv", "text_encoder"], lambda name: name == "conv"))
def test_a_device_with_one_buffer_for_old_and_new_computes_the_same(tmp_path, name):
    """Real step graphs allow it, and a session that does it equals one that keeps every array
    apart.
    """
    arch = Registry.zoo().get(name)
    settings = (
        {"channels": (8, 16), "input_shape": (1, 8, 8)}
        if name == "conv"
        else {"blocks": 1, "vocab": 50}
    )
    tier = infer_layout(arch, arch.settings(settings)).tier(0.5)
    export_architecture(
        ExportRequest(arch, arch.settings(settings), (tier,), Recipe()),
        tmp_path,
        ExportOptions(formats=("onnx",)),
    )
    folder = tmp_path / name / tier.id
    manifest = parse_manifest((folder / "manifest.json").read_bytes())
    assert manifest.states_in_place
    assert manifest.parameters_in_place
    draw = np.random.default_rng(0)
    weights = {p.name: draw.normal(0, 0.1, p.shape).astype(np.float32) for p in manifest.parameters}
    device = TrainSession(manifest, folder / "train.onnx")
    device.load(weights)
    apart = TrainSession(
        manifest.model_copy(update={"parameters_in_place": False}), folder / "train.onnx"
    )
    apart.load(weights)
    places = device.addresses()
    plain = onnxruntime.InferenceSession(
        str(folder / "train.onnx"), providers=["CPUExecutionProvider"]
    )
    values = {parameter_input(key): value for key, value in weights.items()}
    values |= {
        state_input(spec.name): np.full(spec.shape, spec.initial, spec.dtype)
        for spec in manifest.states
    }
    for batch in (4, 4, 3):
        shape = (batch, *manifest.input_shape)
        x = (
            draw.integers(1, 50, shape)
            if name == "text_encoder"
            else draw.normal(size=shape).astype(np.float32)
        )
        y = draw.integers(0, manifest.classes, batch)
        mask = np.ones(manifest.classes, np.float32)
        assert device.step(x, y, mask, 0.1) == apart.step(x, y, mask, 0.1)
        assert device.addresses() == places
        names = [next_name(key) for key in values]
        feeds = {**values, "x": x, "y": y, "mask": mask, "lr": np.array(0.1, np.float32)}
        values = dict(zip(values, plain.run(names, feeds), strict=True))
    for key, value in device.parameters().items():
        np.testing.assert_allclose(value, values[parameter_input(key)], rtol=0, atol=1e-7)
        np.testing.assert_array_equal(value, apart.parameters()[key])
