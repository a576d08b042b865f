"""Operators that the exporter writes, and the effect of each kind on its inputs.

An operator keeps the entries of its inputs unless it is a contraction or a reduction, whose results
are sums over many products or entries. A selector uses one of its inputs to decide which entries of
the others are taken.
"""

from collections.abc import Mapping
from types import MappingProxyType

# Operators that onnxruntime-training writes into a gradient graph and that keep entries.
_GRADIENTS = """
AveragePoolGrad GatherElementsGrad GatherGrad LeakyReluGrad LogSoftmaxGrad_13 MaxPoolGrad ReluGrad
Scale SigmoidGrad SoftmaxGrad_13 TanhGrad
"""
# The other operators here add products.
_MIXING_GRADIENTS = "ConvGrad FusedMatMul LayerNormalizationGrad"
_CONTRACTIONS = "Conv ConvTranspose Gemm MatMul"
_REDUCTIONS = "ArgMax ArgMin ReduceL2 ReduceMax ReduceMean ReduceMin ReduceSum"
_POINTWISE = """
Abs Acos Acosh Add And Asin Asinh Atan Atanh Cast Ceil Cos Cosh Div Equal Erf Exp Floor Greater
GreaterOrEqual HardSigmoid LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax Max Min Mod
Mul Neg Not Or Pow Reciprocal Relu Round Sigmoid Sign Sin Sinh Softmax Sqrt Sub Sum Tan Tanh Where
"""
_MOVING = """
AveragePool Concat CumSum Expand Flatten Gather GatherElements Identity MaxPool Pad Range Reshape
Scan ScatterElements Shape Size Slice Split Squeeze Tile TopK Transpose Unsqueeze
"""
# onnxruntime-training gives these two gradients no separate operator set.
_GRADIENTS_IN_ONNX = "MaxPoolGrad AveragePoolGrad"

OPERATORS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "": frozenset(
            f"{_CONTRACTIONS} {_REDUCTIONS} {_POINTWISE} {_MOVING} {_GRADIENTS_IN_ONNX}".split()
        ),
        "com.microsoft": frozenset(f"{_GRADIENTS} {_MIXING_GRADIENTS}".split()),
    }
)
"""Operators by their operator set; the empty name is ONNX's own."""

OPSETS: Mapping[str, range] = MappingProxyType({"": range(13, 23), "com.microsoft": range(1, 2)})
"""Versions of each operator set that a board supports."""

CONTRACTIONS = frozenset(f"{_CONTRACTIONS} {_MIXING_GRADIENTS}".split())
REDUCTIONS = frozenset(_REDUCTIONS.split())

SIZES = frozenset({"Shape", "Size"})
"""Operators whose result depends on the shape of a value and not on its entries."""

SELECTORS: Mapping[str, int] = MappingProxyType(
    {
        "Gather": 1,
        "GatherElements": 1,
        "GatherGrad": 1,
        "ScatterElements": 1,
        "Where": 0,
    }
)
"""Position of the input that only selects among the entries of the other inputs."""

MASKS = frozenset(["Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"])
"""Operators whose entries are true or false."""

MASKING = frozenset(
    [
        "And",
        "Cast",
        "Expand",
        "Identity",
        "Not",
        "Or",
        "Reshape",
        "Slice",
        "Squeeze",
        "Tile",
        "Transpose",
        "Unsqueeze",
    ]
)
"""Operators that turn masks into masks."""

ENLARGING: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"Expand": (1,), "Range": (0, 1, 2), "Tile": (1,)}
)
"""Operators that make a value larger, with the positions of the inputs that set the size."""
