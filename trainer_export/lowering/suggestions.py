"""Replacements for operators without a lowering."""

from collections.abc import Mapping
from types import MappingProxyType

_USUAL = "express it with matrix products, convolutions, element-wise operators, sums and softmax"

ON_BATCH_SIZES = (
    "the output for a sample must not depend on the batch size; use sums or means instead"
)
"""Advice on arithmetic with the batch size."""

_NO_RANDOM_NUMBERS = (
    "a NoiseLayer of models.zoo.dropout for random numbers: graphs cannot draw them, so its"
    " uniform(x) becomes an input of the graph"
)
_EXTREMES = "amax or amin along dimensions after the batch"
_BUCKETS = "sums of comparisons: (x.unsqueeze(-1) > edges).sum(-1)"

_SUGGESTIONS: Mapping[str, str] = MappingProxyType(
    {
        "dropout": (
            "Dropout of models.zoo.dropout (`shoal export --convert` or models.zoo.conversion"
            " inserts it); for scaled_dot_product_attention, write out the attention with that"
            " Dropout after the softmax, or pass dropout_p=0"
        ),
        "bernoulli": _NO_RANDOM_NUMBERS,
        "exponential": _NO_RANDOM_NUMBERS,
        "rrelu": _NO_RANDOM_NUMBERS,
        "rand": _NO_RANDOM_NUMBERS,
        "normal_": _NO_RANDOM_NUMBERS,
        "uniform_": _NO_RANDOM_NUMBERS,
        "empty": _NO_RANDOM_NUMBERS,
        # With dots, because the name cumprod ends like this one.
        ".prod.": "prod or cumprod along one dimension of fixed size",
        "grid_sampler": ("torch.nn.functional.grid_sample, which is written in simpler operators"),
        "nonzero": "a mask and a multiplication: sizes must not depend on values",
        "copy_.": "a new tensor: a graph cannot write into parameters, buffers or their data",
        "scatter_reduce": "index_add, or amax over torch.where with a mask",
        "kthvalue": "topk",
        ".max.default": _EXTREMES,
        ".min.default": _EXTREMES,
        "bucketize": _BUCKETS,
        "searchsorted": _BUCKETS,
        "lgamma": (
            "Stirling's series above 0: with y = x + 5, (y - 0.5) * y.log() - y + 0.9189385"
            " + 1 / (12 * y) - 1 / (360 * y**3)"
            " - (x * (x + 1) * (x + 2) * (x + 3) * (x + 4)).log()"
        ),
        "digamma": (
            "its series above 0: with y = x + 5, y.log() - 1 / (2 * y) - 1 / (12 * y**2)"
            " + 1 / (120 * y**4) - sum(1 / (x + k) for k in range(5))"
        ),
        "erfinv": (
            "Winitzki's formula, accurate to 0.4 %: with t = (1 - x * x).log() and s = 4.3307 + t"
            " / 2, x.sign() * ((s * s - t / 0.147).sqrt() - s).sqrt()"
        ),
        "sparse": "a dense matrix",
        "unfold": (
            "Tensor.unfold; for a spectrum matrix products with tables of cosines and sines"
        ),
        "linalg": "additions and matrix products",
        "fft": "matrix products with tables of cosines and sines",
        "complex": "real arithmetic on two tensors",
    }
)
"""By a part of the operator's name; the first match is used."""


def suggestion(operator: str) -> str:
    """Return what to use instead of an operator, for the end of a message."""
    for text, replacement in _SUGGESTIONS.items():
        if text in operator:
            return f"use {replacement}"
    return _USUAL
