"""The runtime's own convolutions, on maps in plain order."""

from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.geometry import Geometry
from trainer_export.lowering.values import Spec, Value


def runtime_conv(  # noqa: PLR0913  (what a convolution is)
    emit: Emitter,
    out: Spec,
    x: Value,
    weight: Value,
    geometry: Geometry,
    groups: int = 1,
) -> Value:
    """Return a convolution by the runtime's Conv."""
    name = emit.node(
        "Conv",
        emit.in_logical_order(x),
        emit.in_logical_order(weight),
        kernel_shape=list(geometry.kernel),
        strides=list(geometry.stride),
        pads=list(geometry.padding) * 2,
        dilations=list(geometry.dilation),
        group=groups,
    )
    return emit.value(name, out.shape)


def fits_conv_transpose(geometry: Geometry) -> bool:
    """Return whether the remainder at the end of every dimension is less than the stride.

    ConvTranspose does not accept a larger output padding.
    """
    for axis, size in enumerate(geometry.inputs):
        span = geometry.dilation[axis] * (geometry.kernel[axis] - 1)
        last = size + 2 * geometry.padding[axis] - span - 1
        if last >= geometry.outputs[axis] * geometry.stride[axis]:
            return False
    return True


def runtime_conv_transpose(  # noqa: PLR0913  (what a convolution is)
    emit: Emitter,
    out: Spec,
    grad: Value,
    weight: Value,
    geometry: Geometry,
    groups: int = 1,
) -> Value:
    """Return the input gradient of a convolution by the runtime's ConvTranspose."""
    missing = []
    for axis, size in enumerate(geometry.inputs):
        steps = (geometry.outputs[axis] - 1) * geometry.stride[axis]
        span = geometry.dilation[axis] * (geometry.kernel[axis] - 1)
        missing.append(size - (steps - 2 * geometry.padding[axis] + span + 1))
    grouped = {} if groups == 1 else {"group": groups}
    plain_grad = emit.in_logical_order(grad)
    plain_weight = emit.in_logical_order(weight)
    name = emit.node(
        "ConvTranspose",
        plain_grad,
        plain_weight,
        kernel_shape=list(geometry.kernel),
        strides=list(geometry.stride),
        pads=list(geometry.padding) * 2,
        dilations=list(geometry.dilation),
        output_padding=missing,
        **grouped,
    )
    return emit.value(name, out.shape)
