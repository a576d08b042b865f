"""A model with random parameters and random samples, and its results.

The inference of a layout compares such runs: with other parameters, at other sizes, in training. No
two units of the model are alike, so a unit that moved shows in what the model computes.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fleet_protocol.errors import ConfigError, ModelError
from models.inputs import Row
from models.zoo.dropout import NoiseLayer
from models.zoo.layers import set_mode
from models.zoo.single_output import single_output

State = Mapping[str, Tensor]
"""Tensors by the names of the parameters or buffers that they stand for."""

_SAMPLES = 2
# Vectors are a level and a spread around it: no two units of a norm are alike, and none is near 0.
_LEVEL = 0.5
_SPREAD = 0.1
_SEED = 7
_DRAWN = 65_537  # a prime, so that the rows of a large tensor do not repeat

CHECKPOINT_REFUSAL = "a checkpoint recomputes with other parameters (remove torch.utils.checkpoint)"
"""The error of a model with activation checkpoints."""

RETURN_LOGITS = "`return output.logits`, in a module that holds the model if its class is not yours"
"""The advice for a model that returns an object, a named tuple or a dictionary with logits."""


class TimeUpError(ConfigError):
    """The processor time for a search was up before its outcome was known."""


def check_time(until: float) -> None:
    """Check that a processor time is not over.

    Raises:
        TimeUpError: if it is.
    """
    if time.process_time() > until:
        raise TimeUpError("the time for the proof ran out")


@dataclass(frozen=True)
class Run:
    """The results of one run of a model."""

    # every float tensor that the model returned, in order
    outputs: tuple[Tensor, ...]
    # for each parameter, that of a fixed random sum of the outputs; empty unless requested
    gradients: State


@dataclass(frozen=True)
class RandomizedModel:
    """A model to run with random parameters on random samples.

    Its norms use the statistics of the batch, and its noise layers draw nothing.
    """

    module: nn.Module
    parameters: State
    samples: Tensor
    training: bool = False
    # used instead of the buffers of the module
    buffers: State = field(default_factory=dict)
    until: float = math.inf  # processor time after which it runs no more

    def run(self, parameters: State | None = None, *, gradients: bool = True) -> Run:
        """Compute outputs, and gradients if asked for.

        Args:
            parameters: used instead of the random ones of this model.
            gradients: whether to compute gradients, too.

        Raises:
            TimeUpError: if its time is over.
        """
        check_time(self.until)
        for layer in self.module.modules():
            layer.training = self.training and not isinstance(layer, NoiseLayer)
        parameters = parameters or self.parameters
        if gradients:
            return self._run_with_gradients(parameters)
        with torch.no_grad():
            state = {**self.buffers, **parameters}
            outputs = functional_call(self.module, state, (self.samples,))
            return Run(tuple(_float_tensors(outputs)), {})

    def _run_with_gradients(self, parameters: State) -> Run:
        variables = {name: value.detach().requires_grad_() for name, value in parameters.items()}
        with torch.autograd.graph.disable_saved_tensors_hooks(CHECKPOINT_REFUSAL):
            state = {**self.buffers, **variables}
            returned = functional_call(self.module, state, (self.samples,))
            outputs = tuple(_float_tensors(returned))
        # The sum of an output may be constant, as that of a softmax is, and have no gradient; a sum
        # with random weights has one.
        total = sum((value * noise(value)).sum() for value in outputs)
        if not isinstance(total, Tensor) or not total.requires_grad:
            # Nothing of the outputs depends on a parameter.
            zeros = {name: torch.zeros_like(value) for name, value in variables.items()}
            return Run(outputs, zeros)
        gradients = torch.autograd.grad(
            total, list(variables.values()), allow_unused=True, materialize_grads=True
        )
        return Run(
            tuple(value.detach() for value in outputs),
            dict(zip(variables, gradients, strict=True)),
        )

    @property
    def is_exact(self) -> bool:
        """Whether the model computes in double precision."""
        return all(value.dtype == torch.float64 for value in self.parameters.values())

    def in_training(self) -> "RandomizedModel":
        """Return the model in training mode, in which its noise layers draw nothing either."""
        return replace(self, training=True)

    def scaled(self, samples: Tensor, gain: float, dtype: torch.dtype) -> "RandomizedModel":
        """Return the model with other samples and larger parameters.

        Args:
            samples: replace its samples.
            gain: the factor of all parameters.
            dtype: the precision of parameters, float buffers and float samples.
        """
        parameters = {name: value.to(dtype) * gain for name, value in self.parameters.items()}
        buffers: dict[str, Tensor] = {}
        for name, value in self.module.named_buffers():
            if value.is_floating_point():
                buffers[name] = value.to(dtype, copy=True)
        if samples.is_floating_point():
            samples = samples.to(dtype)
        return replace(self, parameters=parameters, samples=samples, buffers=buffers)


def exact_model(model: RandomizedModel) -> RandomizedModel:
    """Return a model in double precision, or the same model if it cannot compute in it."""
    exact = model.scaled(model.samples, 1.0, torch.float64)
    try:
        exact.run(gradients=False)
    except TimeUpError:
        raise
    except Exception:  # noqa: BLE001 - such as for float32 tensors that a model makes
        return model
    return exact


def randomize(module: nn.Module, samples: Tensor, until: float = math.inf) -> RandomizedModel:
    """Give a model random parameters; on the meta device its buffers get undefined content.

    Args:
        module: the model.
        samples: what it runs on.
        until: processor time after which it runs no more.
    """
    is_meta = any(value.is_meta for value in module.parameters())
    if is_meta:
        module = module.to_empty(device="cpu")
    parameters: dict[str, Tensor] = {}
    for name, value in module.named_parameters():
        drawn = value.detach()
        if value.dim() < 2:
            level = torch.full_like(drawn, _LEVEL) if is_meta else drawn
            drawn = level + _SPREAD * noise(value)
        elif is_meta or bool((drawn == drawn.flatten()[0]).all()):
            # A matrix of equal numbers, as zeros of an adapter, would hide what it multiplies.
            drawn = noise(value) / math.sqrt(max(1, value[0].numel()))
        parameters[name] = drawn
    return RandomizedModel(set_mode(module, "fused"), parameters, samples, until=until)


def vocabulary_of(module: nn.Module) -> int:
    """Return the number of tokens that every embedding of a model has a row for."""
    sizes: list[int] = []
    for layer in module.modules():
        if isinstance(layer, nn.Embedding):
            sizes.append(layer.num_embeddings)
    return min(sizes, default=2)


def random_samples(
    module: nn.Module,
    row: Row,
    count: int = _SAMPLES,
    scale: float = 1.0,
    shift: float = 0.0,
) -> Tensor:
    """Draw samples for a model: normal numbers, or tokens that all its embeddings have.

    Args:
        module: the model, for its vocabulary.
        row: what a sample is.
        count: how many to draw.
        scale: the deviation of the numbers; below 1 also the share of the vocabulary, from its
            first token on, that tokens are drawn from.
        shift: the mean of the numbers.

    Returns:
        A tensor [count, *row.shape], float32 or int64.
    """
    generator = torch.Generator().manual_seed(_SEED)
    tokens = max(1, int(vocabulary_of(module) * min(scale, 1.0)))
    if row.dtype == "float32":
        numbers = torch.randn((count, *row.shape), generator=generator) * scale + shift
        return row.with_tokens(numbers, tokens)  # type: ignore[no-any-return]
    return torch.randint(0, tokens, (count, *row.shape), generator=generator)


def noise(like: Tensor) -> Tensor:
    """Draw normal numbers of a tensor's shape.

    A large tensor repeats a prime number of them, which is cheaper.
    """
    count = like.numel()
    generator = torch.Generator().manual_seed(_SEED + count)
    drawn = torch.randn(min(count, _DRAWN), generator=generator, device=generator.device)
    return drawn.repeat(-(-count // _DRAWN))[:count].view(like.shape)


def _float_tensors(returned: Any) -> list[Tensor]:
    """List the float tensors of whatever a model returns."""
    if isinstance(returned, Tensor):
        return [returned] if returned.is_floating_point() else []
    single = single_output(returned)
    if single is not None:
        return [single]
    if isinstance(returned, Mapping):
        returned = list(returned.values())
    if isinstance(returned, (list, tuple)):
        tensors: list[Tensor] = []
        for element in returned:
            tensors += _float_tensors(element)
        return tensors
    raise ModelError(
        "a model must return tensors, or a tuple, list or dictionary of them, not"
        f" {type(returned).__name__}; remove other values, or return one tensor: {RETURN_LOGITS}"
    )
