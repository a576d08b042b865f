"""The architectures that come with Shoal; one family per module. This package, and no other of `models`, uses torch."""

from __future__ import annotations

from models.zoo.conv import conv
from models.zoo.dropout import feed_noise, noise_layers, noise_shapes
from models.zoo.fml import cnn1, cnn2
from models.zoo.har_cnn import har_cnn
from models.zoo.inference import infer_layout, initial_weights
from models.zoo.layers import Scaler, StaticBatchNorm, set_mode
from models.zoo.lenet5 import lenet5
from models.zoo.minilm_encoder import minilm_encoder
from models.zoo.mlp import mlp
from models.zoo.next_word import next_word
from models.zoo.preresnet import preresnet18
from models.zoo.text_encoder import text_encoder
from models.zoo.token_classifier import token_classifier
from models.zoo.transformer_mlm import transformer_mlm

__all__ = [
    "Scaler",
    "StaticBatchNorm",
    "cnn1",
    "cnn2",
    "conv",
    "feed_noise",
    "har_cnn",
    "infer_layout",
    "initial_weights",
    "lenet5",
    "minilm_encoder",
    "mlp",
    "next_word",
    "noise_layers",
    "noise_shapes",
    "preresnet18",
    "set_mode",
    "text_encoder",
    "token_classifier",
    "transformer_mlm",
]
