"""The architectures that come with Shoal; one family per module. This package, and no other of `models`, uses torch."""

from __future__ import annotations

from models.zoo.conv import conv
from models.zoo.inference import infer_layout, initial_weights
from models.zoo.layers import Scaler, StaticBatchNorm, set_mode
from models.zoo.lenet5 import lenet5
from models.zoo.mlp import mlp
from models.zoo.text_encoder import text_encoder

__all__ = [
    "Scaler",
    "StaticBatchNorm",
    "conv",
    "infer_layout",
    "initial_weights",
    "lenet5",
    "mlp",
    "set_mode",
    "text_encoder",
]
