"""The gradient of a convolution's input, where windows have several taps.

It is the sum over taps of ``dY W`` at the outputs that read an input, in the cheapest of several
ways.
"""

import math

import numpy as np
from numpy.typing import NDArray

from trainer_export.lowering.columns import (
    kernel_matrix,
    kernel_order,
    look_up,
    look_up_ns,
    map_of,
    matrix_of,
    puts_channels_first,
)
from trainer_export.lowering.convolution_costs import cheaper_tiling
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.geometry import Geometry
from trainer_export.lowering.runtime_conv import fits_conv_transpose, runtime_conv_transpose
from trainer_export.lowering.values import Spec, Value, reorder
from trainer_export.lowering.winograd import winograd

# Nanoseconds, measured on two cores of an x86-64 server; only their ratios matter.
_FLOP_NS = 0.005
_WRITTEN_PRODUCT_NS = 0.2  # to write a product that is read again
_SUM_NS = 0.1  # to add a number to a sum
# By the runtime's ConvTranspose, for each output.
_TRANSPOSED_NS = 15.0
# Per floating point operation of ConvTranspose.
_TRANSPOSED_FLOP_NS = 0.015


def gradient_of_windows(
    emit: Emitter,
    out: Spec,
    grad: Value,
    weight: Value,
    geometry: Geometry,
) -> Value:
    """Return the gradient of the map that the windows of a convolution read.

    It is written in the cheapest of three ways: look up the outputs of each input and multiply; or
    multiply first and add the products of each input; or use the runtime's operator. The first
    moves rows of output channels and multiplies for every input. The second moves rows of input
    channels and multiplies for every output. The third is the fastest for few channels. A step
    that may add in any order has a fourth way: the convolution with the turned kernel by
    Winograd's algorithm.

    Args:
        emit: the emitter.
        out: shape of the result.
        grad: the gradient of the convolution's result, complete.
        weight: the kernel.
        geometry: the convolution.
    """
    outputs, inputs = weight.shape[:2]
    if emit.free_order and max(geometry.stride) == 1:
        tiling = cheaper_tiling(geometry.turned, outputs, inputs)
        if tiling is not None:
            return winograd(emit, out, grad, weight, tiling, turned=True)
    if puts_channels_first(emit, geometry, outputs):
        return _multiply_first(emit, out, grad, weight, geometry)
    table = geometry.reverse_table()
    results = math.prod(geometry.outputs)
    # The largest number of outputs that read one input.
    reach = int((table < results).sum(1).max())
    look_up_cost, multiply_cost, runtime_cost = _costs(geometry, weight, reach)
    # Ties go to the runtime, then to looking up first.
    if runtime_cost <= min(look_up_cost, multiply_cost):
        return runtime_conv_transpose(emit, out, grad, weight, geometry)
    if look_up_cost <= multiply_cost:
        return _look_up_first(emit, out, grad, weight, table)
    return _multiply_first(emit, out, grad, weight, geometry)


def _costs(geometry: Geometry, weight: Value, reach: int) -> tuple[float, float, float]:
    """Return nanoseconds per sample of the three ways to write an input's gradient."""
    outputs, inputs = weight.shape[:2]
    places = math.prod(geometry.inputs)
    results = math.prod(geometry.outputs)
    taps = geometry.taps
    flops = 2 * taps * inputs * outputs
    look_up_first = places * (look_up_ns(1, taps, outputs) + flops * _FLOP_NS)
    products = results * (flops * _FLOP_NS + taps * inputs * _WRITTEN_PRODUCT_NS)
    sums = places * (look_up_ns(1, reach, inputs) + reach * inputs * _SUM_NS)
    by_runtime = math.inf
    if fits_conv_transpose(geometry):
        by_runtime = results * (_TRANSPOSED_NS + flops * _TRANSPOSED_FLOP_NS)
    return look_up_first, products + sums, by_runtime


def _look_up_first(
    emit: Emitter,
    out: Spec,
    grad: Value,
    weight: Value,
    table: NDArray[np.int64],
) -> Value:
    """Return the gradient as a product with the gradients of the outputs of each input."""
    outputs, inputs = weight.shape[:2]
    # Taps before outputs, as in the rows of the table, and inputs as columns.
    order = (*range(2, weight.rank), 0, 1)
    physical = reorder(weight.shape, order)
    matrix = (table.shape[1] * outputs, inputs)
    taps = emit.arranged(weight, order)
    kernel = emit.reshaped(taps, physical, matrix)
    columns = look_up(emit, grad, table)
    product = emit.node("Gemm", columns, kernel)
    return map_of(emit, product, out)


def _multiply_first(
    emit: Emitter,
    out: Spec,
    grad: Value,
    weight: Value,
    geometry: Geometry,
) -> Value:
    """Return the gradient as sums of the products of every output and tap."""
    outputs, inputs = weight.shape[:2]
    matrix = matrix_of(emit, grad)
    kernel = kernel_matrix(emit, weight, kernel_order(emit, geometry, outputs))
    products = emit.node("Gemm", matrix, kernel)
    if puts_channels_first(emit, geometry, outputs):
        split = emit.node("Reshape", products, emit.ints(-1, inputs, geometry.taps))
        products = emit.node("Transpose", split, perm=[0, 2, 1])
    count = math.prod(geometry.outputs) * geometry.taps
    row_sizes = emit.ints(-1, count, inputs)
    rows = emit.node("Reshape", products, row_sizes)
    contributions, reach = _contributions(emit, rows, geometry)
    # One product for each input needs no sum.
    if reach == 1 and emit.keeps_planes:
        return map_of(emit, contributions, out)
    input_sizes = emit.ints(-1, reach, inputs)
    by_input = emit.node("Reshape", contributions, input_sizes)
    axes = emit.ints(1)
    total = emit.node("ReduceSum", by_input, axes, keepdims=0)
    return map_of(emit, total, out)


def _contributions(emit: Emitter, rows: str, geometry: Geometry) -> tuple[str, int]:
    """Return for each input its products [output, tap], and the number of all products.

    Inputs with fewer products are padded with zeros.
    """
    table = geometry.reverse_table()
    results = math.prod(geometry.outputs)
    reach = int((table < results).sum(1).max())
    taps = geometry.taps
    zero = results * taps
    # The number of a product: its output times the taps, plus its tap.
    index = np.where(table < results, table * taps + np.arange(taps), zero)
    # After sorting, the row of zeros is last, because it has the largest number.
    index = np.sort(index, axis=1)[:, :reach]
    if (index == zero).any():
        pads = emit.ints(0, 0, 0, 0, 1, 0)
        rows = emit.node("Pad", rows, pads)
    return emit.node("Gather", rows, emit.constant(index.reshape(-1)), axis=1), reach
