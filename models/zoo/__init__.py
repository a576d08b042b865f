"""The architectures that come with Shoal, one family per module. This package, and no other of `models`, uses torch.

A module here that defines an architecture is found by `models.registry.Registry.zoo`; no list names it.
"""

from models.zoo.dropout import feed_noise, noise_layers, noise_shapes
from models.zoo.inference import infer_layout, initial_weights
from models.zoo.layers import Scaler, StaticBatchNorm, set_mode

__all__ = [
    "Scaler",
    "StaticBatchNorm",
    "feed_noise",
    "infer_layout",
    "initial_weights",
    "noise_layers",
    "noise_shapes",
    "set_mode",
]
