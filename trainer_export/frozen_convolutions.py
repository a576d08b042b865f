"""Marks the convolutions of a training step whose kernels the step does not train.

Such a convolution needs no gradient of its kernel, so nothing else reads its columns, and its
lowering may choose any way to compute it. Other graphs keep the order of their additions.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, fx

from fleet_protocol.manifest import parameter_input
from trainer_export.graph import Port

_CONVOLUTION = torch.ops.aten.convolution.default
_TRANSPOSED = 6  # places of arguments
_GROUPS = 8


@torch.library.custom_op("shoal::frozen_convolution", mutates_args=())
def frozen_convolution(  # noqa: PLR0913  (the arguments of aten.convolution)
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """Return a convolution; arguments and result are those of ``aten.convolution``."""
    settings = (list(stride), list(padding), list(dilation), transposed, list(output_padding))
    convolved: Tensor = _CONVOLUTION(x, weight, bias, *settings, groups)
    return convolved


def mark_frozen(graph: fx.Graph, inputs: Sequence[Port], frozen: Collection[str]) -> None:
    """Replace the convolutions of frozen kernels by ``shoal::frozen_convolution``, in place.

    Transposed convolutions and those of several groups stay.

    Args:
        graph: the program of a training step or of a part of it.
        inputs: ports of its placeholders, in their order.
        frozen: names of the parameters that the step never returns.
    """
    names = {parameter_input(name) for name in frozen}
    ports = iter(inputs)
    kernels: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" and next(ports).name in names:
            kernels.add(node)
        if node.target is not _CONVOLUTION or node.args[1] not in kernels:
            continue
        if not node.args[_TRANSPOSED] and node.args[_GROUPS] == 1:
            node.target = torch.ops.shoal.frozen_convolution.default
