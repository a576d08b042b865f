"""The speed of a large matrix product on this machine, by onnxruntime on one thread."""

from collections.abc import Callable
from functools import partial

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

SIZE = 512  # three such matrices fit in the cache of a board's processor
PRODUCT_FLOPS = 2 * SIZE**3


def product_step() -> Callable[[], object]:
    """Return a function that multiplies two float32 matrices of `SIZE` x `SIZE`."""
    shape = [SIZE, SIZE]
    ports = []
    for name in ("left", "right", "product"):
        ports.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    node = helper.make_node("MatMul", ["left", "right"], ["product"])
    graph = helper.make_graph([node], "product", ports[:2], ports[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    draw = np.random.default_rng(0)
    feed = {}
    for name in ("left", "right"):
        feed[name] = draw.normal(size=shape).astype(np.float32)
    return partial(session.run, None, feed)
