"""The whole training step, built on onnxruntime-training's gradient graph of a forward graph."""

import copy
from collections.abc import Mapping, Sequence

import onnx
import torch
from onnx import numpy_helper
from torch import nn

from fleet_protocol.manifest import next_name, parameter_input
from trainer_export.formats.files import GraphFile
from trainer_export.formats.model_bytes import model_bytes
from trainer_export.graph import GraphBuilder, Port
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.program import lower
from trainer_export.lowering.values import Value
from trainer_export.model_inputs import parameter_ports
from trainer_export.recipe import Recipe
from trainer_export.routines.train import trace_optimizer
from trainer_export.update import changing_ports, extra_ports

FOLDER = "ort-training"
"""Folder of the format, below the tier's folder."""

STEP = f"{FOLDER}/step"
"""Key of the step in a manifest."""

_Shapes = Mapping[str, tuple[int, ...]]


def step_file(
    training: onnx.ModelProto,
    batch: Sequence[Port],
    module: nn.Module,
    base: Sequence[str],
    recipe: Recipe,
) -> GraphFile:
    """Return the whole step: the runtime's gradients, then the recipe's optimizer.

    Args:
        training: the runtime's training model.
        batch: the inputs of a batch.
        module: the model.
        base: names of frozen tensors that are only inputs; any other frozen tensor is returned
            unchanged.
        recipe: its optimizer.
    """
    shapes = {}
    for name, value in module.named_parameters():
        shapes[name] = tuple(value.shape)
    # Frozen tensors of a base are inputs, but no outputs.
    base_ports = parameter_ports({name: shapes.pop(name) for name in base})
    trained = {}
    for name, shape in shapes.items():
        if module.get_parameter(name).requires_grad:
            trained[name] = shape
    changing = changing_ports(shapes, recipe)
    inputs = [*changing, *base_ports, *batch, Port("lr", "float32", ())]
    inputs += extra_ports(shapes, recipe)

    graph = GraphBuilder("step")
    for port in inputs:
        graph.input(port)
    _append_gradients(
        graph,
        training,
        [*shapes, *base],
        [port.name for port in batch],
    )
    outputs = [Port("loss", "float32", ())]
    # The gradient graph computes the loss on the way.
    graph.output(outputs[0], _inner("loss"))
    names = _append_optimizer(graph, shapes, trained, recipe)
    for port, name in zip(changing, names, strict=True):
        outputs.append(Port(next_name(port.name), port.dtype, port.shape))
        graph.output(outputs[-1], name)
    domains = []
    # The domain of the runtime's own operators, such as gradients.
    for opset in training.opset_import:
        if opset.domain:
            domains.append((opset.domain, opset.version))
    model = graph.model({"shoal.graph": "step"}, domains)
    data = model_bytes(model)
    return GraphFile(
        STEP,
        f"{STEP}.onnx",
        data,
        tuple(inputs),
        tuple(outputs),
        model,
    )


def _append_optimizer(
    graph: GraphBuilder,
    shapes: _Shapes,
    trained: _Shapes,
    recipe: Recipe,
) -> list[str]:
    """Write the optimizer on the gradients, and return the names of the changed values."""
    emitter = Emitter(graph, "x")
    # The batch dimension does not occur in the optimizer, so its source is a name only.
    inputs = []
    for port in changing_ports(shapes, recipe):
        inputs.append(_value(emitter, port))
    for name, shape in trained.items():
        inputs.append(
            emitter.value(
                _inner(f"{name}_grad"),
                shape,
                torch.float32,
            )
        )
    inputs.append(emitter.value("lr", (), torch.float32))
    for port in extra_ports(shapes, recipe):
        inputs.append(_value(emitter, port))
    trace = trace_optimizer(shapes, recipe, list(trained))
    results = []
    for value in lower(emitter, trace, inputs):
        results.append(emitter.in_logical_order(value))
    return results


def _value(emitter: Emitter, port: Port) -> Value:
    return emitter.value(port.name, port.shape, torch.float32)


def _inner(name: str) -> str:
    """Return a name for a value of the gradient graph that differs from the builder's names."""
    return f"gradient/{name}"


def _append_gradients(
    graph: GraphBuilder,
    training: onnx.ModelProto,
    trained: Sequence[str],
    batch: Sequence[str],
) -> None:
    """Append the gradient graph to the builder's graph.

    Its accumulators lose their consumers and are dropped with all dead nodes. Its shapes are
    copied, too, because the kernel of MaxPoolGrad crashes without its output shape.
    """
    names = {}
    # Parameters and the batch keep the names of the portable train graph.
    for name in trained:
        names[name] = parameter_input(name)
    names |= {name: name for name in batch}
    names[""] = ""  # an omitted optional input
    nodes = []
    for node in training.graph.node:
        renamed = copy.deepcopy(node)
        renamed.name = _inner(node.name)
        renamed.input[:] = [names.get(name, _inner(name)) for name in node.input]
        renamed.output[:] = [_inner(name) if name else "" for name in node.output]
        nodes.append(renamed)
    constants = {}
    for tensor in training.graph.initializer:
        constants[_inner(tensor.name)] = numpy_helper.to_array(tensor)
    shapes = []
    for info in training.graph.value_info:
        renamed_info = copy.deepcopy(info)
        renamed_info.name = _inner(info.name)
        shapes.append(renamed_info)
    graph.append(nodes, constants, shapes)
