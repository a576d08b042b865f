"""A hand-built artifact set: softmax regression behind a static batch norm of the inputs, with the
full SGD recipe.

It is written node by node with onnx.helper, and beside it stands the same step in numpy, so the
device is tested against something no exporter made. With inputs X [B, F], labels y, mask m:

    xn = (X - mean) / sqrt(var + eps)          mean, var over the batch in training, given in evaluation
    z  = (xn W^T + b) * m,  p = softmax(z),  loss = mean(-log p[y])
    dz = (p - onehot(y)) / B * m,  gW = dz^T xn,  gb = sum dz           (xn has no parameters, so nothing flows further)
    s  = min(1, clip / (|g| + 1e-6)),  buf = momentum * buf + (s g + decay p),  p = p - lr * buf

With `ADAPTIVE` the last line is one of an optimizer with two states for each parameter and a
counter of steps, whose second states do not start from zero:

    t = t + 1,  m = b1 m + (1 - b1) s g,  v = b2 v + (1 - b2) (s g)^2,  p = p - lr m / (1 - b1^t) / (sqrt(v) + e)
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from fleet_protocol.blob_store import BlobStore
from fleet_protocol.blobs import blob_ref
from fleet_protocol.manifest import (
    GraphSpec,
    Manifest,
    ParameterSpec,
    StateSpec,
    StatisticSpec,
    TensorSpec,
)
from fleet_protocol.messages import TierChoice
from fleet_protocol.recipe_spec import OptimizerSpec, RecipeSpec
from fleet_protocol.weights import encode_weights

FEATURES = 12
CLASSES = 4
SHAPE = (3, 4)  # of one sample; the graph flattens it
MOMENTUM = 0.9
DECAY = 5e-4
CLIP = 1.0
EPS = 1e-5
CHUNK_BYTES = 1024
NORM = "norm"
B1 = 0.9
B2 = 0.99
E = 1e-3
V0 = 0.01
PARAMETERS = {"linear.weight": (CLASSES, FEATURES), "linear.bias": (CLASSES,)}

SGD = tuple(StateSpec(name=name, shape=shape) for name, shape in PARAMETERS.items())
ADAPTIVE = (
    StateSpec(name="step", shape=(), dtype="int64"),
    *(StateSpec(name=f"first.{name}", shape=shape) for name, shape in PARAMETERS.items()),
    *(
        StateSpec(name=f"second.{name}", shape=shape, initial=V0)
        for name, shape in PARAMETERS.items()
    ),
)

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class TinySet:
    """The set on disk.

    Attributes:
        manifest: its manifest.
        blobs: every file of it, with weights put there by ``choice``.
    """

    manifest: Manifest
    blobs: BlobStore

    def graph(self, key: str) -> Path:
        return self.blobs.path(self.manifest.graphs[key].digest)

    def choice(self, weights: Arrays) -> TierChoice:
        """An offer's choice for these weights, which are put among the blobs."""
        data = encode_weights(weights)
        self.blobs.put(data)
        return TierChoice(
            tier=self.manifest.tier,
            artifact_set=blob_ref(self.manifest.to_bytes(), CHUNK_BYTES),
            weights=blob_ref(data, CHUNK_BYTES),
        )


def initial_weights(seed: int = 0) -> Arrays:
    draw = np.random.default_rng(seed)
    return {
        name: draw.normal(0, 0.1, shape).astype(np.float32) for name, shape in PARAMETERS.items()
    }


def overflowing_weights() -> Arrays:
    """Weights whose logits overflow: infinity minus infinity is not a number on every processor.

    Huge samples are not enough. Their variance overflows too, and the square root of infinity is
    infinity on one processor and not a number on another whose vector unit computes x times 1 /
    sqrt(x).
    """
    return {name: np.full(shape, 3e38, np.float32) for name, shape in PARAMETERS.items()}


def samples(
    count: int = 50, seed: int = 0, classes: int = CLASSES
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Blobs of points, one per label, that the model can learn."""
    draw = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(0, 2, (CLASSES, *SHAPE))
    y = draw.integers(0, classes, count)
    y[:classes] = np.arange(classes)[:count]
    return (centres[y] + draw.normal(size=(count, *SHAPE))).astype(np.float32), y.astype(np.int64)


def _normalise(x: NDArray[Any]) -> NDArray[np.float64]:
    flat = x.reshape(len(x), -1).astype(np.float64)
    return (flat - flat.mean(0)) / np.sqrt(flat.var(0) + EPS)


def reference_step(
    weights: Arrays, states: Arrays, x: NDArray[Any], y: NDArray[Any], mask: NDArray[Any], lr: float
) -> tuple[float, Arrays, Arrays]:
    """The step of the module's text in numpy, float64."""
    loss, gradients = _gradients(weights, x, y, mask)
    buffers = {k: MOMENTUM * states[k] + g + DECAY * weights[k] for k, g in gradients.items()}
    return loss, {k: weights[k] - lr * buffers[k] for k in weights}, buffers


def adaptive_step(
    weights: Arrays, states: Arrays, x: NDArray[Any], y: NDArray[Any], mask: NDArray[Any], lr: float
) -> tuple[float, Arrays, Arrays]:
    """The step of `ADAPTIVE` in numpy, float64."""
    loss, gradients = _gradients(weights, x, y, mask)
    after: Arrays = {"step": states["step"] + 1}
    new = {}
    for name, gradient in gradients.items():
        first = after[f"first.{name}"] = B1 * states[f"first.{name}"] + (1 - B1) * gradient
        second = after[f"second.{name}"] = B2 * states[f"second.{name}"] + (1 - B2) * gradient**2
        new[name] = weights[name] - lr * first / (1 - B1 ** int(after["step"])) / (
            np.sqrt(second) + E
        )
    return loss, new, after


def _gradients(
    weights: Arrays, x: NDArray[Any], y: NDArray[Any], mask: NDArray[Any]
) -> tuple[float, dict[str, NDArray[Any]]]:
    """The loss and the clipped gradients of the module's text."""
    xn = _normalise(x)
    z = (xn @ weights["linear.weight"].T + weights["linear.bias"]) * mask
    z -= z.max(1, keepdims=True)
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    loss = float(-np.log(p[np.arange(len(y)), y]).mean())
    dz = (p - np.eye(len(mask))[y]) / len(y) * mask
    gradients = {"linear.weight": dz.T @ xn, "linear.bias": dz.sum(0)}
    norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
    scale = min(1.0, CLIP / (norm + 1e-6))
    return loss, {name: scale * gradient for name, gradient in gradients.items()}


class _Graph:
    """A list of nodes that names its own tensors."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def const(self, value: Any, dtype: Any = np.float32) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def op(self, kind: str, *inputs: str, out: str | None = None, **attributes: Any) -> str:
        out = out or f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [out], **attributes))
        return out

    def batch_statistics(self, x: str) -> tuple[str, str]:
        """Flat input minus its mean, and its biased variance."""
        axis = self.const([0], np.int64)
        centred = self.op("Sub", x, self.op("ReduceMean", x, axis, keepdims=1))
        return centred, self.op("ReduceMean", self.op("Mul", centred, centred), axis, keepdims=1)

    def normalised(self, centred: str, variance: str) -> str:
        return self.op("Div", centred, self.op("Sqrt", self.op("Add", variance, self.const(EPS))))

    def masked_logits(self, xn: str) -> str:
        product = self.op("MatMul", xn, self.op("Transpose", "param.linear.weight", perm=[1, 0]))
        return self.op("Mul", self.op("Add", product, "param.linear.bias"), "mask")

    def onehot(self) -> str:
        column = self.op("Unsqueeze", "y", self.const([1], np.int64))
        same = self.op("Equal", column, self.const(np.arange(CLASSES), np.int64))
        return self.op("Cast", same, to=TensorProto.FLOAT)

    def model(self, inputs: list[TensorSpec], outputs: list[TensorSpec]) -> bytes:
        def values(specs: list[TensorSpec]) -> list[onnx.ValueInfoProto]:
            kinds = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64}
            return [
                helper.make_tensor_value_info(s.name, kinds[s.dtype], list(s.shape)) for s in specs
            ]

        graph = helper.make_graph(
            self.nodes, "tiny", values(inputs), values(outputs), self.constants
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
        onnx.checker.check_model(model)
        return bytes(model.SerializeToString())


def _spec(name: str, *shape: int | str, dtype: Any = "float32") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def _batch_inputs() -> list[TensorSpec]:
    return [_spec("x", "batch", *SHAPE), _spec("y", "batch", dtype="int64"), _spec("mask", CLASSES)]


def _train_graph(
    states: tuple[StateSpec, ...] = SGD,
) -> tuple[bytes, list[TensorSpec], list[TensorSpec]]:
    g = _Graph()
    xn = g.normalised(*g.batch_statistics(g.op("Flatten", "x", axis=1)))
    z = g.masked_logits(xn)
    hot = g.onehot()
    log_p = g.op("LogSoftmax", z, axis=-1)
    count = g.op("Cast", g.op("Shape", "y"), to=TensorProto.FLOAT)
    total = g.op("ReduceSum", g.op("Mul", log_p, hot), keepdims=0)
    g.op("Neg", g.op("Squeeze", g.op("Div", total, count)), out="loss")
    dz = g.op("Mul", g.op("Div", g.op("Sub", g.op("Exp", log_p), hot), count), "mask")
    gradients = {
        "linear.weight": g.op("MatMul", g.op("Transpose", dz, perm=[1, 0]), xn),
        "linear.bias": g.op("ReduceSum", dz, g.const([0], np.int64), keepdims=0),
    }
    squares = [
        g.op("ReduceSum", g.op("Mul", value, value), keepdims=0) for value in gradients.values()
    ]
    norm = g.op("Add", g.op("Sqrt", g.op("Add", *squares)), g.const(1e-6))
    scale = g.op("Min", g.op("Div", g.const(CLIP), norm), g.const(1.0))
    scaled = {name: g.op("Mul", gradient, scale) for name, gradient in gradients.items()}
    (_momentum if states == SGD else _adaptive)(g, scaled)
    tensors = [_spec(f"param.{n}", *s) for n, s in PARAMETERS.items()]
    tensors += [_spec(f"state.{s.name}", *s.shape, dtype=s.dtype) for s in states]
    inputs = [*tensors, *_batch_inputs(), _spec("lr")]
    outputs = [_spec("loss"), *(t.model_copy(update={"name": f"next.{t.name}"}) for t in tensors)]
    return g.model(inputs, outputs), inputs, outputs


def _momentum(g: _Graph, gradients: dict[str, str]) -> None:
    for name, gradient in gradients.items():
        decayed = g.op("Add", gradient, g.op("Mul", f"param.{name}", g.const(DECAY)))
        buffer = g.op("Mul", f"state.{name}", g.const(MOMENTUM))
        buffer = g.op("Add", buffer, decayed, out=f"next.state.{name}")
        g.op("Sub", f"param.{name}", g.op("Mul", buffer, "lr"), out=f"next.param.{name}")


def _adaptive(g: _Graph, gradients: dict[str, str]) -> None:
    count = g.op("Add", "state.step", g.const(1, np.int64), out="next.state.step")
    power = g.op("Pow", g.const(B1), g.op("Cast", count, to=TensorProto.FLOAT))
    correction = g.op("Sub", g.const(1.0), power)
    for name, gradient in gradients.items():
        first = g.op("Mul", f"state.first.{name}", g.const(B1))
        first = g.op(
            "Add", first, g.op("Mul", gradient, g.const(1 - B1)), out=f"next.state.first.{name}"
        )
        second = g.op("Mul", f"state.second.{name}", g.const(B2))
        square = g.op("Mul", gradient, gradient)
        second = g.op(
            "Add", second, g.op("Mul", square, g.const(1 - B2)), out=f"next.state.second.{name}"
        )
        root = g.op("Add", g.op("Sqrt", second), g.const(E))
        moved = g.op("Div", g.op("Div", g.op("Mul", first, "lr"), correction), root)
        g.op("Sub", f"param.{name}", moved, out=f"next.param.{name}")


def _eval_graph() -> tuple[bytes, list[TensorSpec], list[TensorSpec]]:
    g = _Graph()
    centred = g.op("Sub", g.op("Flatten", "x", axis=1), f"stat.{NORM}.mean")
    z = g.masked_logits(g.normalised(centred, f"stat.{NORM}.var"))
    picked = g.op("Mul", g.op("LogSoftmax", z, axis=-1), g.onehot())
    g.op("Neg", g.op("ReduceSum", picked, keepdims=0), out="loss_sum")
    hits = g.op(
        "Cast", g.op("Equal", g.op("ArgMax", z, axis=-1, keepdims=0), "y"), to=TensorProto.INT64
    )
    g.op("ReduceSum", hits, keepdims=0, out="correct")
    inputs = [_spec(f"param.{n}", *s) for n, s in PARAMETERS.items()]
    inputs += [_spec(f"stat.{NORM}.{kind}", FEATURES) for kind in ("mean", "var")]
    inputs += _batch_inputs()
    outputs = [_spec("loss_sum"), _spec("correct", dtype="int64")]
    return g.model(inputs, outputs), inputs, outputs


def _stats_graph() -> tuple[bytes, list[TensorSpec], list[TensorSpec]]:
    g = _Graph()
    flat = g.op("Flatten", "x", axis=1)
    axis = g.const([0], np.int64)
    g.op("ReduceMean", flat, axis, keepdims=0, out=f"stat.{NORM}.mean")
    centred, _ = g.batch_statistics(flat)
    total = g.op("ReduceSum", g.op("Mul", centred, centred), axis, keepdims=0)
    count = g.op(
        "Cast",
        g.op("Slice", g.op("Shape", "x"), axis, g.const([1], np.int64)),
        to=TensorProto.FLOAT,
    )
    g.op("Div", total, g.op("Sub", count, g.const(1.0)), out=f"stat.{NORM}.var")
    inputs = [_spec("x", "batch", *SHAPE)]
    outputs = [_spec(f"stat.{NORM}.{kind}", FEATURES) for kind in ("mean", "var")]
    return g.model(inputs, outputs), inputs, outputs


def _infer_graph() -> tuple[bytes, list[TensorSpec], list[TensorSpec]]:
    g = _Graph()
    centred = g.op("Sub", g.op("Flatten", "x", axis=1), f"stat.{NORM}.mean")
    xn = g.normalised(centred, f"stat.{NORM}.var")
    product = g.op("MatMul", xn, g.op("Transpose", "param.linear.weight", perm=[1, 0]))
    g.op("Add", product, "param.linear.bias", out="logits")
    inputs = [_spec(f"param.{n}", *s) for n, s in PARAMETERS.items()]
    inputs += [_spec(f"stat.{NORM}.{kind}", FEATURES) for kind in ("mean", "var")]
    inputs += [_spec("x", "batch", *SHAPE)]
    outputs = [_spec("logits", "batch", CLASSES)]
    return g.model(inputs, outputs), inputs, outputs


def broken_train_graph() -> bytes:
    """A train graph that loads and runs, and whose new parameters are NaN."""
    model = onnx.load_from_string(_train_graph()[0])
    for constant in model.graph.initializer:
        if (numpy_helper.to_array(constant) == np.float32(MOMENTUM)).all():
            constant.CopyFrom(numpy_helper.from_array(np.array(np.nan, np.float32), constant.name))
    return bytes(model.SerializeToString())


def write_tiny_set(
    root: Path,
    *,
    tier: str = "w1.00-d1",
    train_graph: bytes | None = None,
    states: tuple[StateSpec, ...] = SGD,
    predicts: bool = False,
) -> TinySet:
    """Put the set into a blob store.

    Args:
        root: folder of the store.
        tier: id of the tier.
        train_graph: another train graph, to make a set that is broken.
        states: of the optimizer: `SGD` or `ADAPTIVE`.
        predicts: with a graph that predicts.
    """
    blobs = BlobStore(root)
    graphs = {}
    for key, (built, inputs, outputs) in {
        "onnx/train": _train_graph(states),
        "onnx/eval": _eval_graph(),
        "onnx/stats": _stats_graph(),
        **({"onnx/infer": _infer_graph()} if predicts else {}),
    }.items():
        data = train_graph if key == "onnx/train" and train_graph is not None else built
        graphs[key] = GraphSpec(
            path=key + ".onnx",
            digest=blobs.put(data),
            size=len(data),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
        )
    offsets = np.cumsum([0, *(4 * int(np.prod(shape)) for shape in PARAMETERS.values())])
    manifest = Manifest(
        arch="tiny",
        settings={},
        tier=tier,
        width=1.0,
        depth=1,
        classes=CLASSES,
        input_shape=SHAPE,
        input_dtype="float32",
        recipe=RecipeSpec(
            optimizer=OptimizerSpec(
                name="sgd", settings={"momentum": MOMENTUM, "weight_decay": DECAY}
            ),
            clip_norm=CLIP,
        ),
        parameters=tuple(
            ParameterSpec(
                name=name,
                shape=shape,
                axes=("classes", "features")[: len(shape)],
                block="head",
                offset=int(offset),
            )
            for (name, shape), offset in zip(PARAMETERS.items(), offsets, strict=False)
        ),
        states=states,
        statistics=(StatisticSpec(name=NORM, channels=FEATURES, axis="features"),),
        graphs=graphs,
        flops_per_sample=1,
        flops_per_step_sample=3,
        peak_memory_bytes=1,
    )
    blobs.put(manifest.to_bytes())
    return TinySet(manifest, blobs)


def packaged() -> dict[str, bytes]:
    """The files of `device_runtime/self_test_set`, which a board trains before it joins.

    python -c "from tests.device_runtime.tiny_set import *; [Path('device_runtime/self_test_set',
    n).write_bytes(d) for n, d in packaged().items()]" writes them.
    """
    with tempfile.TemporaryDirectory() as folder:
        tiny = write_tiny_set(Path(folder))
        train = {
            "onnx/train": tiny.manifest.graphs["onnx/train"].model_copy(
                update={"path": "train.onnx"}
            )
        }
        manifest = tiny.manifest.model_copy(update={"graphs": train, "statistics": ()})
        return {
            "manifest.json": manifest.to_bytes() + b"\n",
            "train.onnx": tiny.graph("onnx/train").read_bytes(),
        }
