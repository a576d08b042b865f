"""Brings a module as it is: replaces layers that cannot be exported by their counterparts here, and
says which.

Batch norm becomes static batch norm (Diao, Ding, Tarokh: "HeteroFL", ICLR 2021), dropout takes its
random numbers from outside, fused attention and recurrent layers with dropout inside fall into
parts, and activations write a new tensor.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.weight_norm import WeightNorm

from fleet_protocol.errors import ConfigError
from models.architecture import Architecture, call_builder
from models.conversion_switch import left_out
from models.cut import Cut
from models.zoo.dropout import ChannelDropout, Dropout, SampleDropout
from models.zoo.layers import SpectralNorm, StaticBatchNorm
from models.zoo.restoring import Restored, Untouched


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer of given weights; draws no random numbers."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
    return layer


class Attention(nn.Module):
    """What `torch.nn.MultiheadAttention` does, with a projection each for queries, keys, values and
    the output.
    """

    in_proj_bias = (
        None  # by this PyTorch's encoder layers know that they must not take the fused kernel
    )

    def __init__(self, fused: nn.MultiheadAttention) -> None:
        """Take the weights of a fused layer.

        Raises:
            ConfigError: it has biases for keys and values of their own, or adds a token of zeros.
        """
        super().__init__()
        if fused.bias_k is not None or fused.add_zero_attn:
            raise ConfigError(
                "MultiheadAttention(add_bias_kv or add_zero_attn) cannot be converted; leave them out"
            )
        self.heads = fused.num_heads
        self.batch_first = fused.batch_first
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
        """Attend; arguments and results are those of `torch.nn.MultiheadAttention`, for batches
        alone.
        """
        del is_causal  # a hint: the mask says it
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = (
            torch.unflatten(layer(x), -1, (self.heads, -1)).transpose(1, 2)
            for layer, x in ((self.query, query), (self.key, key), (self.value, value))
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        for mask in (
            attn_mask,
            None if key_padding_mask is None else key_padding_mask[:, None, None],
        ):
            if mask is not None:
                mask = torch.unflatten(mask, 0, (-1, self.heads)) if mask.dim() == 3 else mask  # noqa: PLW2901
                scores = (
                    scores.masked_fill(mask, -math.inf)
                    if mask.dtype == torch.bool
                    else scores + mask
                )
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
        settings: dict[str, Any] = {
            "bias": whole.bias,
            "batch_first": whole.batch_first,
            "device": "meta",
        }
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


@dataclass(frozen=True)
class Replacement:
    """One layer that was replaced."""

    path: str
    old: str
    new: str


def _norm(layer: Any) -> nn.Module:
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
        raise ConfigError("a lazy batch norm cannot be converted; name its number of channels")
    norm = StaticBatchNorm(layer.num_features, layer.eps)
    if layer.affine:
        norm.weight = layer.weight
        norm.bias = layer.bias
    else:
        norm.requires_grad_(requires_grad=False)
    if layer.running_mean is not None:
        norm.running_mean = layer.running_mean
        norm.running_var = layer.running_var
    return norm


_Rule = Callable[[Any], nn.Module | None]

_RULES: Mapping[type[nn.Module], tuple[_Rule, str]] = MappingProxyType(
    {
        nn.modules.batchnorm._BatchNorm: (  # noqa: SLF001 - of one to three dimensions, and the one over devices
            _norm,
            "StaticBatchNorm: statistics of the batch; asked from devices after a round",
        ),
        nn.Dropout: (
            lambda layer: Dropout(layer.p),
            "Dropout: its random numbers are an input of the graph",
        ),
        **dict.fromkeys(
            (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
            (
                lambda layer: ChannelDropout(layer.p),
                "ChannelDropout: its random numbers are an input of the graph",
            ),
        ),
        nn.MultiheadAttention: (
            Attention,
            "Attention: a projection each for queries, keys and values",
        ),
        nn.utils.parametrizations._SpectralNorm: (  # noqa: SLF001 - no public name
            lambda layer: SpectralNorm(layer.dim),
            "SpectralNorm: its vectors are found anew each time",
        ),
        nn.RNNBase: (
            lambda layer: RecurrentStack(layer) if layer.dropout and layer.num_layers > 1 else None,
            "RecurrentStack: a layer each, with Dropout between them",
        ),
    }
)


def _stochastic_depth(layer: Any) -> nn.Module | None:
    """Of timm, torchvision and whoever wrote their own: told by name, as PyTorch has none."""
    rate = next(
        (getattr(layer, name) for name in ("drop_prob", "drop_rate", "p") if hasattr(layer, name)),
        None,
    )
    is_one = (
        type(layer).__name__.endswith(("DropPath", "StochasticDepth"))
        and getattr(layer, "mode", "row") == "row"
    )
    alone = not [*layer.children(), *layer.parameters()] and getattr(layer, "scale_by_keep", True)
    return SampleDropout(rate) if is_one and alone and isinstance(rate, float) else None


def _counterpart(layer: nn.Module) -> tuple[nn.Module, str] | None:
    dropped = _stochastic_depth(layer)
    if dropped is not None:
        return dropped, "SampleDropout: its random numbers are an input of the graph"
    for kind, (rule, meaning) in _RULES.items():
        if isinstance(layer, kind):
            given = next(
                base for base in type(layer).__mro__ if base.__module__.startswith("torch.")
            )
            if getattr(type(layer), "forward", None) is not getattr(given, "forward", None):
                what = f"{type(layer).__name__} has a forward of its own"
                name = meaning.partition(":")[0]
                raise ConfigError(
                    f"{what}, which {name} would drop; hold the {given.__name__} in a module beside it"
                )
            made = rule(layer)
            return None if made is None else (made, meaning)
    return None


def _with_plain_masks(
    layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Told that its mask is any mask, a stack does not look at its values, which no trace knows."""
    name = "is_causal" if isinstance(layer, nn.TransformerEncoder) else "tgt_is_causal"
    return args, {**kwargs, name: kwargs.get(name) or False}


def _new_weight_norms(layer: nn.Module) -> bool:
    """Make PyTorch's older weight norms, whose result no copy can have, the newer ones.

    Whether there were any.
    """
    old = [hook for hook in layer._forward_pre_hooks.values() if isinstance(hook, WeightNorm)]  # noqa: SLF001 - no public name
    for hook in old:
        nn.utils.remove_weight_norm(layer, hook.name)
        nn.utils.parametrizations.weight_norm(layer, hook.name, hook.dim)
    return bool(old)


def is_replaced(layer: nn.Module) -> bool:
    """Return whether a conversion replaces a layer; errors are those of `convert`."""
    return _counterpart(layer) is not None


def convert(module: nn.Module) -> tuple[nn.Module, tuple[Replacement, ...]]:
    """Replace what cannot be exported, in place but for a model that is such a layer.

    Returns it and what was replaced.

    Weights and statistics are kept; those of attention and of recurrent layers get other names. The
    result also stores how the state of the original module follows from it, for `origin_of`.

    Raises:
        ConfigError: a layer has settings that its counterpart lacks.
    """
    classes = left_out()
    if classes is not None:
        classes.append(type(module).__name__)
        return module, ()
    untouched = Untouched.of(module)
    done: list[Replacement] = []
    made: dict[int, nn.Module] = {}

    def walk(layer: nn.Module, path: str) -> nn.Module:
        if id(layer) in made:
            return made[id(layer)]
        found = _counterpart(layer)
        if found is not None:
            new, meaning = found
            done.append(Replacement(path, type(layer).__name__, meaning))
            new.train(layer.training)
            made[id(layer)] = new
            return new
        made[id(layer)] = layer
        if _new_weight_norms(layer):
            done.append(
                Replacement(
                    path,
                    "weight_norm",
                    "weight_norm of torch.nn.utils.parametrizations",
                )
            )
        if getattr(layer, "inplace", False) is True:
            cast("Any", layer).inplace = False
            done.append(
                Replacement(
                    path,
                    f"{type(layer).__name__}(inplace=True)",
                    "the same with a result of its own",
                )
            )
        if isinstance(layer, nn.TransformerEncoder):
            layer.use_nested_tensor = False  # its shortcut knows PyTorch's own attention alone
        if isinstance(layer, (nn.TransformerEncoder, nn.TransformerDecoder)):
            layer.register_forward_pre_hook(_with_plain_masks, with_kwargs=True)
        for name, child in list(layer._modules.items()):  # noqa: SLF001 - named_children omits second names
            if child is not None:
                setattr(layer, name, walk(child, f"{path}.{name}" if path else name))
        return layer

    found = walk(module, "")
    if done and _ORIGIN not in vars(found):
        vars(found)[_ORIGIN] = untouched.restored(
            lambda _, layer: made.get(id(layer), layer) is not layer
        )
    return found, tuple(done)


_ORIGIN = "_shoal_origin"


def origin_of(module: nn.Module) -> Restored | None:
    """Return how the state of the original module follows from a converted one.

    None if nothing was converted.
    """
    origin: Restored | None = vars(module).get(_ORIGIN)
    return origin


def converted(arch: Architecture) -> Architecture:
    """An architecture whose models are converted as they are built."""

    def build(cut: Any, **settings: Any) -> nn.Module:
        return convert(arch.build(cut, **settings))[0]

    cast("Any", build).__wrapped__ = arch.build
    return replace(arch, build=build)


def replacements(
    arch: Architecture, settings: Mapping[str, Any] | None = None
) -> tuple[Replacement, ...]:
    """What :func:`converted` replaces in an architecture's global model.

    A ConfigError also if the builder fails.
    """
    with torch.device("meta"):
        return convert(call_builder(arch, Cut(), settings))[1]
