"""The nets that people put on boards, as their papers write them, for benchmarks.

Widths follow a cut, so that each can be sliced; a head has ten classes.
"""

from collections.abc import Mapping
from types import MappingProxyType

from benchmarks.nets.by_sample import by_sample
from benchmarks.nets.convnext import convnext_atto
from benchmarks.nets.keyword import ds_cnn
from benchmarks.nets.mobile import efficientnet_lite0, mobilenet_v2, mobilenet_v3_small
from benchmarks.nets.residual import resnet18
from benchmarks.nets.segmentation import unet
from benchmarks.nets.vision_transformer import vit_tiny
from models.architecture import Architecture
from models.zoo.conversion_plan import converted

_WRITTEN = (
    mobilenet_v2,
    mobilenet_v3_small,
    efficientnet_lite0,
    resnet18,
    convnext_atto,
    ds_cnn,
    vit_tiny,
    unet,
    by_sample(mobilenet_v3_small),
    by_sample(resnet18),
)

NETS: Mapping[str, Architecture] = MappingProxyType(
    {arch.name: converted(arch) for arch in _WRITTEN}
)
"""By name, converted as ``shoal export --convert`` does."""
