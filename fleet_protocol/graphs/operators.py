"""The operators that the exporter writes: all that a board runs, and how each carries what it is given.

An operator *keeps* what it is given unless it is a contraction or a reduction, whose numbers are sums over many
products or entries. A *selector* decides by some of its inputs which entries of the others are taken.
"""

from collections.abc import Mapping
from types import MappingProxyType

OPSETS: Mapping[str, range] = MappingProxyType({"": range(13, 23), "com.microsoft": range(1, 2)})
"""Operator sets by name, with the versions that are read; what onnxruntime-training has of its own is the second."""

IR_VERSIONS = range(8, 11)

# What onnxruntime-training writes into a gradient graph: operators of its own, and two of no set at all.
_GRADIENTS = """
AveragePoolGrad GatherElementsGrad GatherGrad LeakyReluGrad LogSoftmaxGrad_13 MaxPoolGrad ReluGrad Scale SigmoidGrad
SoftmaxGrad_13 TanhGrad
"""
_MIXING_GRADIENTS = "ConvGrad FusedMatMul LayerNormalizationGrad"
_CONTRACTIONS = "Conv ConvTranspose Gemm MatMul"
_REDUCTIONS = "ArgMax ArgMin ReduceL2 ReduceMax ReduceMean ReduceMin ReduceSum"
_POINTWISE = """
Abs Acos Acosh Add And Asin Asinh Atan Atanh Cast Ceil Cos Cosh Div Equal Erf Exp Floor Greater GreaterOrEqual
HardSigmoid LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax Max Min Mod Mul Neg Not Or Pow Reciprocal Relu
Round Sigmoid Sign Sin Sinh Softmax Sqrt Sub Sum Tan Tanh Where
"""
_MOVING = """
AveragePool Concat CumSum Expand Flatten Gather GatherElements Identity MaxPool Pad Range Reshape Scan ScatterElements
Shape Size Slice Split Squeeze Tile TopK Transpose Unsqueeze
"""

OPERATORS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "": frozenset(f"{_CONTRACTIONS} {_REDUCTIONS} {_POINTWISE} {_MOVING} MaxPoolGrad AveragePoolGrad".split()),
        "com.microsoft": frozenset(f"{_GRADIENTS} {_MIXING_GRADIENTS}".split()),
    }
)
"""Operators by the set they are of."""

CONTRACTIONS = frozenset(f"{_CONTRACTIONS} {_MIXING_GRADIENTS}".split())
REDUCTIONS = frozenset(_REDUCTIONS.split())

SIZES = frozenset({"Shape", "Size"})
"""Operators that tell how large a value is and nothing of its entries."""

SELECTORS: Mapping[str, int] = MappingProxyType(
    {"Gather": 1, "GatherElements": 1, "GatherGrad": 1, "ScatterElements": 1, "Where": 0}
)
"""Operators to the input that only says which entries of the others are taken."""

MASKS = frozenset(["Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"])
"""Operators whose entries are true or false."""

MASKING = frozenset(
    ["And", "Cast", "Expand", "Identity", "Not", "Or", "Reshape", "Slice", "Squeeze", "Tile", "Transpose", "Unsqueeze"]
)
"""Operators that make masks of masks."""
