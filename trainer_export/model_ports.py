"""What a trace needs of a model: a copy in a mode, a pure call, and the names and shapes of what goes in and out."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fleet_protocol.errors import ExportError
from fleet_protocol.manifest import anchor_input, noise_input, parameter_input, statistic_mean, statistic_variance
from models.zoo.dropout import feed_noise, noise_shapes
from models.zoo.layers import Mode, StaticBatchNorm, set_mode
from trainer_export.graph import Port
from trainer_export.operators import static_batch_norm
from trainer_export.tracing import BATCH, recorded_modules

__all__ = [
    "Signature",
    "anchor_ports",
    "batch_ports",
    "call_model",
    "check_logits",
    "logits_port",
    "mask_port",
    "model_noise",
    "noise_ports",
    "norms",
    "parameter_names",
    "parameter_ports",
    "prepared",
    "statistic_ports",
]

_PROBE_BATCH = 2  # a static batch norm needs more than one sample
_MOST_DIMENSIONS = 2  # tokens and classes


@dataclass(frozen=True)
class Signature:
    """What a model takes and returns.

    Attributes:
        input_shape: shape of one sample.
        input_dtype: ``float32`` or ``int64``.
        classes: number of logits.
        label_shape: shape of the labels of one sample: empty for one label, ``(tokens,)`` for one per token.
    """

    input_shape: tuple[int, ...]
    input_dtype: str
    classes: int
    label_shape: tuple[int, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        """Element type of the samples."""
        return torch.int64 if self.input_dtype == "int64" else torch.float32

    def samples(self, count: int) -> Tensor:
        """That many samples of zeros, for a run that only shapes come from."""
        return torch.zeros((count, *self.input_shape), dtype=self.torch_dtype)

    def with_labels_of(self, model: nn.Module) -> Signature:
        """The same with the label shape that a model's logits have.

        Args:
            model: run once, on a copy.

        Raises:
            ExportError: the model does not return logits of these classes.
        """
        with torch.no_grad():
            logits = set_mode(copy.deepcopy(model), "eval")(self.samples(_PROBE_BATCH))
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else ()
        signature = replace(self, label_shape=shape[1:-1])
        check_logits(logits, signature)
        return signature


class _OperatorNorm(nn.Module):
    """Stands in for a StaticBatchNorm in a train trace; same parameters, one operator."""

    def __init__(self, norm: StaticBatchNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        normal: Tensor = static_batch_norm(x, self.weight, self.bias, self.eps)
        return normal


def prepared(model: nn.Module, mode: Mode, *, operators: bool = False) -> nn.Module:
    """A copy of the model in a mode, optionally with its norms as operators."""
    model = set_mode(copy.deepcopy(model), mode)
    if operators:
        for path, norm in norms(model):
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, _OperatorNorm(norm))
    return model


def norms(model: nn.Module) -> list[tuple[str, StaticBatchNorm]]:
    """The static batch norms of a model by path."""
    return [(path, m) for path, m in model.named_modules() if isinstance(m, StaticBatchNorm)]


def parameter_names(model: nn.Module) -> list[str]:
    """The names of the parameters, in registration order."""
    return [name for name, _ in model.named_parameters()]


def call_model(
    model: nn.Module,
    names: Sequence[str],
    tensors: Sequence[Tensor],
    x: Tensor,
    noise: Mapping[str, Tensor] | None = None,
) -> Any:
    """Run a model with other parameters and buffers than its own.

    Args:
        model: what to run.
        names: of parameters and buffers.
        tensors: their values.
        x: samples.
        noise: random numbers of its layers by path; a layer that is not named draws its own.
    """
    feed_noise(model, noise or {})
    try:
        with recorded_modules(model):
            return functional_call(model, dict(zip(names, tensors, strict=True)), (x,))
    finally:
        feed_noise(model, {})


def check_logits(logits: Any, signature: Signature) -> None:
    """See that a model returned what its signature says.

    Raises:
        ExportError: it did not.
    """
    expected = (*signature.label_shape, signature.classes)
    if isinstance(logits, Tensor) and tuple(logits.shape[1:]) == expected and len(expected) <= _MOST_DIMENSIONS:
        return
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    wanted = ", ".join(map(str, ("batch", *expected)))
    other = "" if signature.label_shape else f" (with a label per token: [batch, tokens, {signature.classes}])"
    raise ExportError(f"the model must return logits [{wanted}], it returned {shape}{other}")


def model_noise(model: nn.Module, signature: Signature) -> dict[str, tuple[int, ...]]:
    """Shapes of the random numbers that a sample needs in training, by path of the layer.

    Raises:
        ExportError: a layer is used in a way that its noise cannot be an input.
    """
    return noise_shapes(prepared(model, "train"), signature.samples(_PROBE_BATCH))


# -- ports -------------------------------------------------------------------------------------------------------------


def parameter_ports(model: nn.Module) -> tuple[Port, ...]:
    """The parameters."""
    return tuple(Port(parameter_input(n), "float32", tuple(p.shape)) for n, p in model.named_parameters())


def anchor_ports(shapes: Mapping[str, tuple[int, ...]]) -> tuple[Port, ...]:
    """The weights sent, for the proximal term, and its strength."""
    anchors = tuple(Port(anchor_input(name), "float32", shape) for name, shape in shapes.items())
    return (*anchors, Port("mu", "float32", ()))


def statistic_ports(layers: Sequence[tuple[str, StaticBatchNorm]]) -> tuple[Port, ...]:
    """Means and variances of the static batch norms."""
    return tuple(
        Port(name(path), "float32", tuple(norm.weight.shape))
        for path, norm in layers
        for name in (statistic_mean, statistic_variance)
    )


def noise_ports(shapes: Mapping[str, tuple[int, ...]]) -> tuple[Port, ...]:
    """The random numbers of :func:`model_noise`."""
    return tuple(Port(noise_input(path), "float32", (BATCH, *shape)) for path, shape in shapes.items())


def batch_ports(signature: Signature, *names: str) -> tuple[Port, ...]:
    """Samples ``x``, labels ``y``, or both."""
    ports = {
        "x": Port("x", signature.input_dtype, (BATCH, *signature.input_shape)),
        "y": Port("y", "int64", (BATCH, *signature.label_shape)),
    }
    return tuple(ports[name] for name in names)


def mask_port(signature: Signature) -> Port:
    """The label mask."""
    return Port("mask", "float32", (signature.classes,))


def logits_port(signature: Signature) -> Port:
    """The logits."""
    return Port("logits", "float32", (BATCH, *signature.label_shape, signature.classes))
