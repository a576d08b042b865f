"""Graphs of narrow models: what is done so that a few channels, which lie last, take no longer than
they must.
"""

import functools
from collections import Counter

import onnx
import pytest

from tests.trainer_export import test_memory
from trainer_export.footprint import peak_memory
from trainer_export.formats.onnx import fit_into_memory

graph_of = functools.cache(test_memory.graph_of)


def shapes_of(model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    """Sizes of every value and constant that has a shape, 0 for the batch."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    values = (*graph.value_info, *graph.input, *graph.output)
    found = {v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim) for v in values}
    return found | {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}


@pytest.mark.parametrize("kind", ["train", "eval"])
@pytest.mark.parametrize(("name", "width"), [("conv", 0.0625), ("har_cnn", 0.25)])
def test_no_broadcast_works_on_runs_of_a_few_numbers(name, width, kind):
    """Whatever meets the last axis alone is repeated along the axis before it, where that is longer
    than 1.
    """
    model = graph_of(name, width, kind)
    shapes = shapes_of(model)
    met = Counter()
    for node in model.graph.node:
        if node.op_type not in {"Add", "Sub", "Mul", "Div"}:
            continue
        whole = max((shapes[name] for name in node.input), key=len)
        for small in (shapes[name] for name in node.input):
            if (
                len(whole) == len(small) > 2
                and small != whole
                and small[-1] == whole[-1] > 1
                and whole[-2] > 1
            ):
                met[small[-2]] += 1
                assert small[-2] == whole[-2], (node.name, small, whole)
    assert met.total() > 3


@pytest.mark.parametrize("kind", ["train", "eval", "stats"])
@pytest.mark.parametrize(("name", "width"), [("conv", 0.0625), ("lenet5", 1), ("har_cnn", 0.125)])
def test_up_to_eight_channels_lie_in_planes(name, width, kind):
    """No feature map that is worked on has as few channels last: what runs along them would be as
    short.
    """
    model = graph_of(name, width, kind)
    shapes = shapes_of(model)
    worked_on = {"Add", "Sub", "Mul", "Relu", "ReduceMean", "ReduceSum"}
    read = [shapes[node.input[0]] for node in model.graph.node if node.op_type in worked_on]
    maps = [shape for shape in read if len(shape) > 2 and 0 in shape]
    first = {"conv": (4, 0, 28, 28), "lenet5": (6, 0, 14, 14), "har_cnn": (4, 0, 128)}[name]
    assert first in maps
    assert not [shape for shape in maps if 1 < shape[-1] <= 8 and shape[-2] > shape[-1]]


@pytest.mark.parametrize(("width", "again"), [(0.0625, False), (0.25, True)])
def test_nothing_is_computed_again_for_memory_that_nobody_misses(width, again):
    """A step of `conv` at 1/16 stays below 5 MB, of 100 of the process; at 1/4 what is cheap is
    dropped.
    """
    fitted = fit_into_memory(graph_of("conv", width, "train"))
    made_again = {node.op_type for node in fitted.graph.node if ".memory." in node.name}
    assert ("Max" in made_again) == again
    assert again or peak_memory(fitted) < 4.6e6
