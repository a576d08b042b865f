"""A tiny exported architecture made by hand: two linear layers and a static batch norm, tiers 1 and
1/2.

The graphs compute what their names promise, so that a round over them can be checked by arithmetic.
The train graph is a placeholder: the scripted devices of these tests do not train.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from fleet_protocol.manifest import (
    GraphSpec,
    Manifest,
    ParameterSpec,
    StatisticSpec,
    TensorSpec,
    digest_of,
    parameter_input,
    statistic_mean,
    statistic_variance,
)
from fleet_protocol.recipe_spec import OptimizerSpec, RecipeSpec
from fleet_protocol.weights import encode_weights
from models.axes import Axis, AxisKind
from models.block_names import HEAD, block_name
from models.dims import Dim
from models.layout import Layout
from models.parameters import Parameter, Statistic
from models.shares import frozen_parameters
from models.tier import Tier

ARCH = "tiny"
INPUTS = 6
HIDDEN = 8
CLASSES = 4
WIDTHS = (1.0, 0.5)
NORM = "norm"


def tiny_layout(*, inputs: int = INPUTS, hidden: int = HIDDEN) -> Layout:
    axes = {
        "inputs": Axis("inputs", inputs, AxisKind.FIXED),
        "hidden": Axis("hidden", hidden),
        "classes": Axis("classes", CLASSES, AxisKind.FIXED),
    }
    return Layout(
        arch=ARCH,
        settings={"hidden": hidden},
        axes=axes,
        parameters=(
            Parameter(
                "hidden.weight", (hidden, inputs), (Dim("hidden"), Dim("inputs")), block_name(1)
            ),
            Parameter("hidden.bias", (hidden,), (Dim("hidden"),), block_name(1)),
            Parameter("head.weight", (CLASSES, hidden), (Dim("classes"), Dim("hidden")), HEAD),
            Parameter("head.bias", (CLASSES,), (Dim("classes"),), HEAD),
        ),
        statistics=(Statistic(NORM, (Dim("hidden"),), block_name(1)),),
        depth=1,
        depths=(1,),
        label_axes=("classes",),
        input_shape=(inputs,),
        input_dtype="float32",
        classes=CLASSES,
    )


def _value(name: str, shape: list[Any], kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _parameters(layout: Layout, tier: Tier) -> list[onnx.ValueInfoProto]:
    return [
        _value(parameter_input(name), list(shape)) for name, shape in layout.shapes(tier).items()
    ]


def _graph(
    name: str, nodes: list[Any], inputs: list[Any], outputs: list[Any], constants: list[Any] = ()
) -> bytes:
    graph = helper.make_graph(nodes, name, inputs, outputs, initializer=list(constants))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model)
    return model.SerializeToString()


def _hidden() -> list[Any]:
    return [
        helper.make_node("Gemm", ["x", "param.hidden.weight", "param.hidden.bias"], ["a"], transB=1)
    ]


def eval_graph(layout: Layout, tier: Tier) -> bytes:
    """relu((a - mean) / sqrt(var + eps)), then the head; loss_sum and correct as the protocol names
    them.
    """
    width = layout.axes["hidden"].kept(tier.width)
    nodes = [
        *_hidden(),
        helper.make_node("Sub", ["a", statistic_mean(NORM)], ["centred"]),
        helper.make_node("Add", [statistic_variance(NORM), "eps"], ["shifted"]),
        helper.make_node("Sqrt", ["shifted"], ["deviation"]),
        helper.make_node("Div", ["centred", "deviation"], ["normed"]),
        helper.make_node("Relu", ["normed"], ["h"]),
        helper.make_node("Gemm", ["h", "param.head.weight", "param.head.bias"], ["raw"], transB=1),
        helper.make_node("Mul", ["raw", "mask"], ["logits"]),
        helper.make_node("LogSoftmax", ["logits"], ["shares"], axis=1),
        helper.make_node("Unsqueeze", ["y", "last"], ["labels"]),
        helper.make_node("GatherElements", ["shares", "labels"], ["right"], axis=1),
        helper.make_node("ReduceSum", ["right"], ["gain"], keepdims=0),
        helper.make_node("Neg", ["gain"], ["loss_sum"]),
        helper.make_node("ArgMax", ["logits"], ["best"], axis=1, keepdims=0),
        helper.make_node("Equal", ["best", "y"], ["hits"]),
        helper.make_node("Cast", ["hits"], ["ones"], to=TensorProto.INT64),
        helper.make_node("ReduceSum", ["ones"], ["correct"], keepdims=0),
    ]
    inputs = [
        *_parameters(layout, tier),
        _value(statistic_mean(NORM), [width]),
        _value(statistic_variance(NORM), [width]),
        _value("x", ["batch", *layout.input_shape]),
        _value("y", ["batch"], TensorProto.INT64),
        _value("mask", [layout.classes]),
    ]
    outputs = [_value("loss_sum", []), _value("correct", [], TensorProto.INT64)]
    eps = helper.make_tensor("eps", TensorProto.FLOAT, [], [1e-5])
    last = helper.make_tensor("last", TensorProto.INT64, [1], [1])
    return _graph("eval", nodes, inputs, outputs, [eps, last])


def stats_graph(layout: Layout, tier: Tier) -> bytes:
    """Batch mean and unbiased variance of the hidden activations."""
    width = layout.axes["hidden"].kept(tier.width)
    nodes = [
        *_hidden(),
        helper.make_node("ReduceMean", ["a", "rows"], [statistic_mean(NORM)], keepdims=0),
        helper.make_node("Sub", ["a", statistic_mean(NORM)], ["centred"]),
        helper.make_node("Mul", ["centred", "centred"], ["squared"]),
        helper.make_node("ReduceSum", ["squared", "rows"], ["total"], keepdims=0),
        helper.make_node("Shape", ["x"], ["shape"], end=1),
        helper.make_node("Sub", ["shape", "rows_one"], ["fewer"]),
        helper.make_node("Cast", ["fewer"], ["divisor"], to=TensorProto.FLOAT),
        helper.make_node("Div", ["total", "divisor"], [statistic_variance(NORM)]),
    ]
    constants = [
        helper.make_tensor("rows", TensorProto.INT64, [1], [0]),
        helper.make_tensor("rows_one", TensorProto.INT64, [1], [1]),
    ]
    inputs = [*_parameters(layout, tier), _value("x", ["batch", *layout.input_shape])]
    outputs = [_value(statistic_mean(NORM), [width]), _value(statistic_variance(NORM), [width])]
    return _graph("stats", nodes, inputs, outputs, constants)


def _spec(folder: Path, name: str, data: bytes, model: onnx.ModelProto) -> GraphSpec:
    (folder / name).write_bytes(data)

    def tensor(value: Any) -> TensorSpec:
        kind = value.type.tensor_type
        shape = tuple(d.dim_param or d.dim_value for d in kind.shape.dim)
        dtype = "int64" if kind.elem_type == TensorProto.INT64 else "float32"
        return TensorSpec(name=value.name, dtype=dtype, shape=shape)

    return GraphSpec(
        path=name,
        digest=digest_of(data),
        size=len(data),
        inputs=tuple(map(tensor, model.graph.input)),
        outputs=tuple(map(tensor, model.graph.output)),
    )


def manifest_of(layout: Layout, tier: Tier, folder: Path) -> Manifest:
    folder.mkdir(parents=True, exist_ok=True)
    graphs = {}
    sources = {"eval": eval_graph, "stats": stats_graph, "train": stats_graph, "infer": stats_graph}
    for key, build in sources.items():
        data = build(layout, tier)
        graphs[f"onnx/{key}"] = _spec(folder, f"{key}.onnx", data, onnx.load_from_string(data))
    specs = []
    offset = 0
    for item in layout.kept(tier):
        shape = layout.local_shape(item.dims, tier.width)
        spec = ParameterSpec(
            name=item.name,
            shape=shape,
            axes=tuple(d.axis for d in item.dims),
            block=item.block,
            offset=offset,
        )
        specs.append(spec)
        offset += spec.nbytes
    return Manifest(
        arch=layout.arch,
        settings={},
        tier=tier.id,
        width=tier.width,
        depth=tier.depth,
        classes=layout.classes,
        input_shape=layout.input_shape,
        input_dtype="float32",
        recipe=RecipeSpec(optimizer=OptimizerSpec(name="sgd")),
        parameters=tuple(specs),
        frozen=frozen_parameters(layout, tier),
        states=(),
        statistics=(
            StatisticSpec(
                name=NORM, channels=layout.axes["hidden"].kept(tier.width), axis="hidden"
            ),
        ),
        graphs=graphs,
        flops_per_sample=100,
        flops_per_step_sample=300,
        peak_memory_bytes=int(100e6 * tier.width),
    )


def tiny_weights(layout: Layout, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {item.name: rng.standard_normal(item.shape, np.float32) for item in layout.parameters}


def export_tiny(root: Path, layout: Layout | None = None) -> Layout:
    """Write the artifact folder of the tiny architecture; returns its layout."""
    layout = layout or tiny_layout()
    folder = root / layout.arch
    folder.mkdir(parents=True)
    (folder / "layout.json").write_text(layout.to_json())
    (folder / "init.safetensors").write_bytes(encode_weights(tiny_weights(layout)))
    for width in WIDTHS:
        tier = layout.tier(width)
        manifest = manifest_of(layout, tier, folder / tier.id)
        (folder / tier.id / "manifest.json").write_bytes(manifest.to_bytes())
    return layout
