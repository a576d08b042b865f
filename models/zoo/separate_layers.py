"""Layers of PyTorch in parts that an exporter and a cut can have one by one: attention, and recurrent layers."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from fleet_protocol.errors import ConfigError
from models.zoo.dropout import Dropout


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer of given weights; draws no random numbers."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
    return layer


class Attention(nn.Module):
    """What `torch.nn.MultiheadAttention` does, with a projection each for queries, keys, values and the output."""

    in_proj_bias = None  # by this PyTorch's encoder layers know that they must not take the fused kernel

    def __init__(self, fused: nn.MultiheadAttention) -> None:
        """Take the weights of a fused layer.

        Raises:
            ConfigError: it has biases for keys and values of their own, or adds a token of zeros.
        """
        super().__init__()
        if fused.bias_k is not None or fused.add_zero_attn:
            raise ConfigError("MultiheadAttention(add_bias_kv or add_zero_attn) cannot be converted; leave them out")
        self.heads, self.batch_first = fused.num_heads, fused.batch_first
        parts: dict[str, Tensor] = dict(fused.named_parameters())
        if "in_proj_weight" in parts:
            weights = list(parts["in_proj_weight"].chunk(3))
        else:
            weights = [parts[f"{name}_proj_weight"] for name in "qkv"]
        biases = parts["in_proj_bias"].chunk(3) if "in_proj_bias" in parts else [None] * 3
        self.query, self.key, self.value = map(_linear, weights, biases)
        self.output = fused.out_proj
        self.dropout = Dropout(fused.dropout)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; arguments and results are those of `torch.nn.MultiheadAttention`, for batches alone."""
        del is_causal  # a hint: the mask says it
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = (
            torch.unflatten(layer(x), -1, (self.heads, -1)).transpose(1, 2)
            for layer, x in ((self.query, query), (self.key, key), (self.value, value))
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        for mask in (attn_mask, None if key_padding_mask is None else key_padding_mask[:, None, None]):
            if mask is not None:
                mask = torch.unflatten(mask, 0, (-1, self.heads)) if mask.dim() == 3 else mask  # noqa: PLW2901
                scores = scores.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        shares = scores.softmax(-1)
        found = self.output((self.dropout(shares) @ v).transpose(1, 2).flatten(2))
        shown = (shares.mean(1) if average_attn_weights else shares) if need_weights else None
        return (found if self.batch_first else found.transpose(0, 1)), shown


class RecurrentStack(nn.Module):
    """What `torch.nn.LSTM`, `GRU` and `RNN` of several layers with dropout between them do."""

    def __init__(self, whole: nn.RNNBase) -> None:
        """Take the weights of a whole layer."""
        super().__init__()
        self.dropouts = nn.ModuleList(Dropout(whole.dropout) for _ in range(whole.num_layers - 1))
        self.layers = nn.ModuleList()
        ways = 2 if whole.bidirectional else 1
        settings: dict[str, Any] = {"bias": whole.bias, "batch_first": whole.batch_first, "device": "meta"}
        settings |= {"bidirectional": whole.bidirectional}
        settings |= {"nonlinearity": whole.nonlinearity} if isinstance(whole, nn.RNN) else {}
        settings |= {"proj_size": whole.proj_size} if whole.proj_size else {}
        kind: Any = type(whole)
        for place in range(whole.num_layers):
            size = whole.input_size if place == 0 else (whole.proj_size or whole.hidden_size) * ways
            layer = kind(size, whole.hidden_size, 1, **settings)
            for name in [name for name, _ in layer.named_parameters()]:
                old: Tensor = getattr(whole, name.replace("_l0", f"_l{place}"))
                setattr(layer, name, nn.Parameter(old.detach().clone(), old.requires_grad))
            self.layers.append(layer)

    def forward(self, x: Tensor, start: Any = None) -> tuple[Tensor, Any]:
        """Run the layers; arguments and results are those of PyTorch's, for batches alone."""
        several = isinstance(start, (tuple, list))
        ends = []
        for place, layer in enumerate(self.layers):
            given = None
            if start is not None:
                ways = 2 if layer.bidirectional else 1
                cut = slice(place * ways, (place + 1) * ways)
                given = tuple(state[cut] for state in start) if several else start[cut]
            x, end = layer(self.dropouts[place - 1](x) if place else x, given)
            ends.append(end)
        if isinstance(ends[0], tuple):
            return x, tuple(torch.cat(states) for states in zip(*ends, strict=True))
        return x, torch.cat(ends)
