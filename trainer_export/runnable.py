"""An infer graph with its weights inside: a file that stock onnxruntime runs without anything of Shoal."""

from collections.abc import Mapping
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from fleet_protocol.errors import ConfigError


def runnable(graph: bytes, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """Put weights into a serialized infer graph, by its inputs ``param.*`` and ``stat.*``, and metadata.

    Returns:
        A model of one input, ``x``, and one output, ``logits``.

    Raises:
        ConfigError: a tensor is missing.
    """
    model = onnx.load_model_from_string(graph)
    inputs = [value for value in model.graph.input if value.name not in tensors]
    missing = [value.name for value in inputs if value.name != "x"]
    if missing:
        raise ConfigError(
            f"the store has no {missing[0]} that fits this tier: statistics are kept of the tier that is judged;"
            " export that one (evaluation.tier), or take --format safetensors"
        )
    used = {value.name for value in model.graph.input}
    model.graph.initializer.extend(numpy_helper.from_array(tensors[name], name) for name in tensors if name in used)
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    helper.set_model_props(model, {item.key: item.value for item in model.metadata_props} | dict(metadata))
    data: bytes = model.SerializeToString(deterministic=True)
    return data
