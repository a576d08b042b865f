"""Graphs that were fitted into less memory compute the same, and need less."""

import numpy as np
import onnx
import onnxruntime
import pytest

from models.architecture import build
from models.registry import Registry, infer_layout
from tests.marking import mostly_slow
from trainer_export.footprint import peak_memory
from trainer_export.formats.onnx import fit_into_memory
from trainer_export.lowering.program import write_graph
from trainer_export.model_inputs import Signature
from trainer_export.recipe import Recipe
from trainer_export.routines.evaluate import trace_eval
from trainer_export.routines.train import trace_train

MEGABYTE = 1024 * 1024


def graph_of(name: str, width: float, kind: str) -> onnx.ModelProto:
    arch = Registry.zoo().get(name)
    layout = infer_layout(arch, None)
    signature = Signature(layout.input_shape, layout.input_dtype, layout.classes)
    module = build(arch, width)
    return write_graph(
        (trace_train if kind == "train" else trace_eval)(module, signature, Recipe())
    )


def feeds_of(model: onnx.ModelProto, batch: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    feeds = {}
    for value in model.graph.input:
        shape = [d.dim_value or batch for d in value.type.tensor_type.shape.dim]
        if value.type.tensor_type.elem_type == onnx.TensorProto.INT64:
            feeds[value.name] = draw.integers(0, 4, shape)
        elif value.name == "mask":
            feeds[value.name] = np.ones(shape, np.float32)
        elif value.name == "lr":
            feeds[value.name] = np.array(0.05, np.float32)
        else:
            feeds[value.name] = np.abs(draw.normal(0, 0.1, shape)).astype(np.float32)
    return feeds


def run(model: onnx.ModelProto, batch: int) -> dict[str, np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds_of(model, batch)), strict=True))


@pytest.mark.parametrize("kind", ["train", "eval"])
@pytest.mark.parametrize(
    ("name", "width"),
    mostly_slow(
        [("conv", 1.0), ("conv", 0.25), ("lenet5", 1.0), ("text_encoder", 1.0)],
        lambda case: case[1] < 1,
    ),
)
def test_the_rewritten_graph_computes_the_same(name, width, kind):
    """Every output agrees for batches of any size, one sample included, and the interface is
    unchanged.
    """
    model = graph_of(name, width, kind)
    before = model.SerializeToString(deterministic=True)
    fitted = fit_into_memory(model)
    assert model.SerializeToString(deterministic=True) == before
    onnx.checker.check_model(fitted)
    for attribute in ("input", "output"):
        assert getattr(fitted.graph, attribute) == getattr(model.graph, attribute)
    for batch in (1, 7, 32):
        expected = run(model, batch)
        found = run(fitted, batch)
        for output, value in expected.items():
            np.testing.assert_allclose(found[output], value, rtol=1e-4, atol=1e-5, err_msg=output)


def test_a_step_of_the_wide_convolutions_needs_less_than_half():
    """The columns of `conv` at full width no longer lie in memory as a whole, nor from forward to
    backward.
    """
    model = graph_of("conv", 1.0, "train")
    buffers = 4 * 1_556_874 * 4
    before = peak_memory(model) - buffers
    after = peak_memory(fit_into_memory(model)) - buffers
    assert after < 0.6 * before
    assert after < 45 * MEGABYTE


@pytest.mark.slow
def test_rewriting_twice_changes_nothing_more():
    """What fits is left alone."""
    once = fit_into_memory(graph_of("conv", 0.25, "train"))
    assert len(fit_into_memory(once).graph.node) == len(once.graph.node)
