"""Layers with separate steps, in place of PyTorch's fused layers with the same weights.

The fused calls cannot be cut by widths, and the random numbers of their dropout cannot be inputs of
a graph.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from fleet_protocol.errors import ModelError
from models.zoo.dropout import Dropout


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Make a linear layer of given weights; draws no random numbers."""
    # On the meta device, so that no initial values are drawn; the copies replace them.
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
    return layer


class Attention(nn.Module):
    """`torch.nn.MultiheadAttention` with a projection each for queries, keys, values and output."""

    # PyTorch's encoder layers read this, and do not use their fused kernel if it is None.
    in_proj_bias = None

    def __init__(self, fused: nn.MultiheadAttention) -> None:
        """Copy the weights of a fused layer.

        Raises:
            ConfigError: it has separate biases for keys and values, or adds a token of zeros.
        """
        super().__init__()
        if fused.bias_k is not None or fused.add_zero_attn:
            raise ModelError(
                "MultiheadAttention(add_bias_kv or add_zero_attn) cannot be converted; remove"
                " these options"
            )
        self.heads = fused.num_heads
        self.bias_k = None
        self.bias_v = None
        self.batch_first = fused.batch_first
        parameters: dict[str, Tensor] = dict(fused.named_parameters())
        if "in_proj_weight" in parameters:
            # One matrix for all three, or three if keys or values have another size.
            weights = list(parameters["in_proj_weight"].chunk(3))
        else:
            weights = [parameters[f"{name}_proj_weight"] for name in "qkv"]
        biases: list[Tensor | None] = [None, None, None]
        if "in_proj_bias" in parameters:
            biases = list(parameters["in_proj_bias"].chunk(3))
        self.query = _linear(weights[0], biases[0])
        self.key = _linear(weights[1], biases[1])
        self.value = _linear(weights[2], biases[2])
        self.output = fused.out_proj
        self.dropout = Dropout(fused.dropout)

    @property
    def out_proj(self) -> nn.Module:
        """The projection of the output, by the name that PyTorch's layer has for it."""
        return self.output

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
        """Attend; arguments and results are those of `torch.nn.MultiheadAttention`, for batches."""
        del is_causal  # a hint; the mask has the same content
        if not self.batch_first:
            query = query.transpose(0, 1)
            key = key.transpose(0, 1)
            value = value.transpose(0, 1)
        q = self._split_heads(self.query(query))
        k = self._split_heads(self.key(key))
        v = self._split_heads(self.value(value))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if attn_mask is not None:
            scores = self._masked(scores, attn_mask)
        if key_padding_mask is not None:
            scores = self._masked(scores, key_padding_mask[:, None, None])
        shares = scores.softmax(-1)
        mixed = self.dropout(shares) @ v
        attended = self.output(mixed.transpose(1, 2).flatten(2))
        weights = None
        if need_weights:
            weights = shares.mean(1) if average_attn_weights else shares
        if not self.batch_first:
            attended = attended.transpose(0, 1)
        return attended, weights

    def _split_heads(self, x: Tensor) -> Tensor:
        """Bring [batch, tokens, heads * size] to [batch, heads, tokens, size]."""
        return torch.unflatten(x, -1, (self.heads, -1)).transpose(1, 2)

    def _masked(self, scores: Tensor, mask: Tensor) -> Tensor:
        """Mask scores [batch, heads, queries, keys]: True hides a key, floats are added."""
        # A mask for each head comes joined with the batch.
        if mask.dim() == 3:
            mask = torch.unflatten(mask, 0, (-1, self.heads))
        if mask.dtype == torch.bool:
            return scores.masked_fill(mask, -math.inf)
        return scores + mask


class RecurrentStack(nn.Module):
    """`torch.nn.LSTM`, `GRU` or `RNN` layer by layer, with dropout between the layers."""

    def __init__(self, whole: nn.RNNBase) -> None:
        """Copy the weights of a whole layer."""
        super().__init__()
        self.dropouts = nn.ModuleList(Dropout(whole.dropout) for _ in range(whole.num_layers - 1))
        self.layers = nn.ModuleList()
        kind: Any = type(whole)
        settings = _settings_of(whole)
        size = whole.input_size
        for place in range(whole.num_layers):
            layer = kind(size, whole.hidden_size, 1, **settings)
            # All names first: the loop replaces the parameters that an iterator would walk over.
            names = list(dict(layer.named_parameters()))
            for name in names:
                # PyTorch numbers the parameters of a stack by layer.
                old: Tensor = getattr(whole, name.replace("_l0", f"_l{place}"))
                setattr(layer, name, nn.Parameter(old.detach().clone(), old.requires_grad))
            self.layers.append(layer)
            # The next layer reads both directions.
            size = (whole.proj_size or whole.hidden_size) * _directions(whole)

    def flatten_parameters(self) -> None:
        """Do nothing: PyTorch's layer brings its weights into one piece of memory."""

    def forward(
        self,
        input: Tensor,  # noqa: A002 - the name that PyTorch's has
        hx: Any = None,
    ) -> tuple[Tensor, Any]:
        """Run the layers; arguments and results are those of PyTorch's, for batches."""
        x = input
        ends = []
        for place, layer in enumerate(self.layers):
            own_start = _start_of(layer, hx, place)
            if place:
                x = self.dropouts[place - 1](x)
            x, end = layer(x, own_start)
            ends.append(end)
        if isinstance(ends[0], tuple):
            # LSTM has two states for each layer.
            return x, tuple(torch.cat(states) for states in zip(*ends, strict=True))
        return x, torch.cat(ends)


def _directions(layer: Any) -> int:
    return 2 if layer.bidirectional else 1


def _settings_of(whole: nn.RNNBase) -> dict[str, Any]:
    """Return the keywords to build a single layer of a stack with."""
    settings: dict[str, Any] = {
        "bias": whole.bias,
        "batch_first": whole.batch_first,
        "device": "meta",
        "bidirectional": whole.bidirectional,
    }
    if isinstance(whole, nn.RNN):
        settings["nonlinearity"] = whole.nonlinearity
    if whole.proj_size:
        settings["proj_size"] = whole.proj_size
    return settings


def _start_of(layer: nn.Module, start: Any, place: int) -> Any:
    """Cut the first state of one layer out of that of the stack: a tensor, or for LSTM two."""
    if start is None:
        return None
    directions = _directions(layer)
    own = slice(place * directions, (place + 1) * directions)
    if isinstance(start, (tuple, list)):
        return tuple(state[own] for state in start)
    return start[own]
