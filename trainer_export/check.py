"""Compares exported graphs with PyTorch; one that does not agree is not published.

PyTorch here is eager autograd of the module as it was written, torch.optim.SGD and clip_grad_norm_. The trace is never
used as its own witness: lowerings, rewrites and operators of our own would all agree with themselves.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fleet_protocol.errors import ExportError
from fleet_protocol.manifest import (
    CheckSpec,
    anchor_input,
    next_name,
    noise_input,
    parameter_input,
    state_input,
    statistic_mean,
    statistic_variance,
)
from models.zoo.dropout import feed_noise
from models.zoo.layers import StaticBatchNorm, set_mode
from trainer_export.model_ports import Signature, model_noise
from trainer_export.proximal import proximal_loss
from trainer_export.recipe import Recipe

__all__ = [
    "LIMIT",
    "Reference",
    "SizedBatches",
    "Worst",
    "calm_torch",
    "check_eval",
    "check_infer",
    "check_statistics",
    "check_train",
    "cross_entropy",
    "open_session",
    "repeated",
    "run_session",
    "vocabulary_of",
]

LIMIT = 1e-4
"""Largest relative deviation of a tensor from PyTorch that is published."""

_FLOOR = 0.1  # a tensor counts as at least this share of the largest of its kind: zero gradients have no scale
LEARNING_RATE = 0.01
MU = 0.5  # of the proximal term: large, so that it counts within a few steps
_STEPS = 6
_IGNORED = 0.2
_TORCH_IGNORES = -100
_TRIES = 3
_THREADS = 2

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class SizedBatches:
    """Random batches for a model.

    Attributes:
        signature: shapes and types.
        vocabulary: tokens are below this; only for int64 samples.
        sizes: samples per batch, taken in turn.
        seed: of the random numbers.
    """

    signature: Signature
    vocabulary: int = 2
    sizes: tuple[int, ...] = (8, 3)
    seed: int = 0

    def take(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """That many pairs of samples and labels."""
        generator = torch.Generator().manual_seed(self.seed)
        for i in range(count):
            shape = (self.sizes[i % len(self.sizes)], *self.signature.input_shape)
            if self.signature.input_dtype == "int64":
                x = torch.randint(0, self.vocabulary, shape, generator=generator)
            else:
                x = torch.randn(shape, generator=generator)
            places = (*shape[:1], *self.signature.label_shape)
            y = torch.randint(0, self.signature.classes, places, generator=generator)
            if self.signature.label_shape:  # some labels that count for nothing
                y = torch.where(torch.rand(places, generator=generator) < _IGNORED, -1, y)
            yield x, y

    def noise(self, shapes: Mapping[str, tuple[int, ...]], count: int, step: int) -> dict[str, Tensor]:
        """Random numbers for the layers that need them.

        Args:
            shapes: of one sample, by path of the layer.
            count: samples.
            step: other numbers for every step.
        """
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        return {path: torch.rand((count, *shape), generator=generator) for path, shape in shapes.items()}

    def mask(self) -> Tensor:
        """A label mask with one label missing, so that masking is compared too."""
        mask = torch.ones(self.signature.classes)
        mask[-1] = 0.0
        return mask


@dataclass
class Worst:
    """The largest deviation seen so far."""

    absolute: float = 0.0
    relative: float = 0.0
    tensor: str = ""
    sizes: list[int] = field(default_factory=list)

    def compare(self, found: Mapping[str, NDArray[Any]], expected: Mapping[str, NDArray[Any]]) -> None:
        """Take tensors of one kind into account."""
        largest = max((float(np.abs(v).max(initial=0.0)) for v in expected.values()), default=0.0)
        for name, reference in expected.items():
            difference = np.abs(found[name].astype(np.float64) - reference)
            absolute = float(difference.max(initial=0.0)) if np.isfinite(found[name]).all() else float("inf")
            scale = max(float(np.abs(reference).max(initial=0.0)), _FLOOR * largest, 1e-12)
            self.absolute = max(self.absolute, absolute)
            if absolute / scale > self.relative or not self.tensor:
                self.relative, self.tensor = absolute / scale, name

    def report(self, graph: str, steps: int) -> CheckSpec:
        """The figures, or an error that names the tensor."""
        if self.relative > LIMIT or not np.isfinite(self.relative):
            raise ExportError(
                f"{graph} does not agree with PyTorch: {self.tensor} is off by {self.relative:.1e} of its largest value"
                f" (limit {LIMIT:.0e}); nothing is published. This is a fault of a lowering: report it with the model"
            )
        return CheckSpec(
            graph=graph,
            runtime=f"onnxruntime {onnxruntime.__version__}",
            steps=steps,
            batch_sizes=tuple(dict.fromkeys(self.sizes)),
            worst_absolute=self.absolute,
            worst_relative=self.relative,
            worst_tensor=self.tensor,
        )


def open_session(model: bytes, threads: int = _THREADS) -> onnxruntime.InferenceSession:
    """A session on the processor that only reports errors.

    Raises:
        ExportError: the runtime refuses the graph.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ExportError(f"onnxruntime {onnxruntime.__version__} refuses the exported graph: {error}") from error


@contextlib.contextmanager
def calm_torch() -> Iterator[None]:
    """PyTorch on one thread: for a few small steps its threads cost more than they bring, more so on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def vocabulary_of(model: nn.Module) -> int:
    """The number of tokens every embedding of a model knows."""
    return min((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=2)


def check_train(
    model: bytes, module: nn.Module, recipe: Recipe, batches: SizedBatches, *, graph: str = "onnx/train"
) -> CheckSpec:
    """Train with the graph and with PyTorch from the same start and compare loss, parameters and states.

    A difference in rounding may flip a ReLU or the larger of two nearly equal maxima, which no limit on a single run
    can tell from a small fault; so a run that deviates is repeated with other random batches. A fault deviates in
    every run.

    Args:
        model: the serialized train graph.
        module: the module as its author wrote it; not changed.
        recipe: what the graph was made for.
        batches: what to train on.
        graph: key of the graph in the manifest, for the report.

    Returns:
        The figures of the first run within the limit.

    Raises:
        ExportError: the graph deviates by more than `LIMIT`; the message names the tensor.
    """
    session = open_session(model)
    shapes = model_noise(module, batches.signature)

    def run(seeded: SizedBatches) -> CheckSpec:
        worst = Worst()
        reference = Reference(module, recipe)
        parameters, states = reference.snapshot()
        for number, (x, y) in enumerate(seeded.take(_STEPS)):
            worst.sizes.append(len(y))
            mask, noise = seeded.mask(), seeded.noise(shapes, len(y), number)
            feed = {parameter_input(n): v for n, v in parameters.items()}
            feed |= {state_input(n): v for n, v in states.items()}
            feed |= {"x": x.numpy(), "y": y.numpy(), "mask": mask.numpy(), "lr": np.array(LEARNING_RATE, np.float32)}
            feed |= reference.anchors() | {"mu": np.array(MU, np.float32)}
            feed |= {noise_input(path): drawn.numpy() for path, drawn in noise.items()}
            outputs = run_session(session, feed)
            loss = reference.step(x, y, mask, noise)
            parameters = {n: outputs[next_name(parameter_input(n))] for n in parameters}
            states = {n: outputs[next_name(state_input(n))] for n in states}
            expected, expected_states = reference.snapshot()
            worst.compare({"loss": outputs["loss"]}, {"loss": loss})
            worst.compare(parameters, expected)
            worst.compare(_named("state", states), _named("state", expected_states))
        return worst.report(graph, _STEPS)

    return repeated(run, batches)


def _named(kind: str, arrays: Mapping[str, NDArray[Any]]) -> Arrays:
    return {f"{kind}.{name}": array for name, array in arrays.items()}


def repeated(run: Callable[[SizedBatches], CheckSpec], batches: SizedBatches) -> CheckSpec:
    """The report of the first of a few runs, with other random batches each, that is within the limit."""
    for attempt in range(_TRIES):
        seeded = SizedBatches(batches.signature, batches.vocabulary, batches.sizes, batches.seed + attempt)
        try:
            return run(seeded)
        except ExportError:
            if attempt == _TRIES - 1:
                raise
    raise AssertionError("unreachable")


class Reference:
    """PyTorch training the module as it was written."""

    def __init__(self, module: nn.Module, recipe: Recipe, learning_rate: float = LEARNING_RATE) -> None:
        self._module = set_mode(copy.deepcopy(module), "train")
        self._recipe = recipe
        self._sent = [p.detach().clone() for p in self._module.parameters()]
        self._optimizer = torch.optim.SGD(
            self._module.parameters(),
            lr=learning_rate,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
        )

    def step(self, x: Tensor, y: Tensor, mask: Tensor, noise: Mapping[str, Tensor] | None = None) -> NDArray[Any]:
        """One training step; returns the loss."""
        self._optimizer.zero_grad()
        feed_noise(self._module, noise or {})
        loss = cross_entropy(self._module(x) * mask, y)
        whole = loss
        if self._recipe.proximal:
            whole = loss + proximal_loss(list(self._module.parameters()), self._sent, MU)
        whole.backward()  # type: ignore[no-untyped-call]
        if self._recipe.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._module.parameters(), self._recipe.clip_norm)
        self._optimizer.step()
        return loss.detach().numpy()

    def anchors(self) -> Arrays:
        """The weights at the start, as the graph takes them for the proximal term."""
        named = zip(self._module.named_parameters(), self._sent, strict=True)
        return {anchor_input(name): value.numpy() for (name, _), value in named}

    def snapshot(self) -> tuple[Arrays, Arrays]:
        """Copies of parameters and states by parameter name."""
        named = dict(self._module.named_parameters())
        parameters = {name: p.detach().numpy().copy() for name, p in named.items()}
        if not self._recipe.has_state:
            return parameters, {}
        return parameters, {name: self._buffer(p) for name, p in named.items()}

    def _buffer(self, parameter: nn.Parameter) -> NDArray[Any]:
        buffer = self._optimizer.state.get(parameter, {}).get("momentum_buffer")
        return np.zeros(tuple(parameter.shape), np.float32) if buffer is None else buffer.numpy().copy()


def cross_entropy(logits: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    """PyTorch's cross entropy over the labels that count, float32 [].

    Args:
        logits: float32 [batch, classes] or [batch, tokens, classes].
        y: labels, int64 [batch] or [batch, tokens]; negative ones count for nothing.
        reduction: ``mean`` or ``sum``.
    """
    counted = torch.where(y < 0, _TORCH_IGNORES, y)
    return nn.functional.cross_entropy(
        logits.flatten(0, -2), counted.flatten(), ignore_index=_TORCH_IGNORES, reduction=reduction
    )


def check_eval(model: bytes, module: nn.Module, batches: SizedBatches, *, graph: str = "onnx/eval") -> CheckSpec:
    """Compare the sum of losses and the number of right answers; arguments as for :func:`check_train`.

    Raises:
        ExportError: the graph deviates.
    """

    def expected(module: nn.Module, x: Tensor, y: Tensor) -> Arrays:
        logits = module(x) * batches.mask()
        losses = cross_entropy(logits, y, reduction="sum")
        return {"loss_sum": losses.numpy(), "correct": (logits.argmax(-1) == y).sum().numpy()}

    def extra(y: Tensor) -> Arrays:
        return {"y": y.numpy(), "mask": batches.mask().numpy()}

    return _check_forward(model, module, batches, graph, expected, extra)


def check_infer(model: bytes, module: nn.Module, batches: SizedBatches, *, graph: str = "onnx/infer") -> CheckSpec:
    """Compare the logits; arguments as for :func:`check_train`.

    Raises:
        ExportError: the graph deviates.
    """
    return _check_forward(model, module, batches, graph, lambda m, x, _: {"logits": m(x).numpy()}, lambda _: {})


def check_statistics(model: bytes, module: nn.Module, batches: SizedBatches, *, graph: str = "onnx/stats") -> CheckSpec:
    """Compare the statistics of every static batch norm; arguments as for :func:`check_train`.

    Raises:
        ExportError: the graph deviates.
    """
    session, worst = open_session(model), Worst()
    reference = set_mode(copy.deepcopy(module), "statistics")
    parameters = {parameter_input(n): p.detach().numpy() for n, p in reference.named_parameters()}
    for x, _ in batches.take(len(batches.sizes)):
        worst.sizes.append(len(x))
        outputs = run_session(session, {**parameters, "x": x.numpy()})
        with torch.no_grad():
            reference(x)
        for path, norm in _norms(reference):
            assert norm.last_mean is not None
            assert norm.last_var is not None
            pair = {statistic_mean(path): norm.last_mean.numpy(), statistic_variance(path): norm.last_var.numpy()}
            for name, value in pair.items():
                worst.compare(outputs, {name: value})
    return worst.report(graph, len(batches.sizes))


def _norms(module: nn.Module) -> list[tuple[str, StaticBatchNorm]]:
    return [(path, m) for path, m in module.named_modules() if isinstance(m, StaticBatchNorm)]


def _check_forward(
    model: bytes,
    module: nn.Module,
    batches: SizedBatches,
    graph: str,
    expected: Callable[[nn.Module, Tensor, Tensor], Arrays],
    extra: Callable[[Tensor], Arrays],
) -> CheckSpec:
    session, worst = open_session(model), Worst()
    reference = set_mode(copy.deepcopy(module), "eval")
    feed = {parameter_input(n): p.detach().numpy() for n, p in reference.named_parameters()}
    feed |= _random_statistics(reference, batches.seed)
    for x, y in batches.take(len(batches.sizes)):
        worst.sizes.append(len(y))
        outputs = run_session(session, {**feed, "x": x.numpy(), **extra(y)})
        with torch.no_grad():
            for name, value in expected(reference, x, y).items():
                worst.compare(outputs, {name: value})
    return worst.report(graph, len(batches.sizes))


def _random_statistics(module: nn.Module, seed: int) -> Arrays:
    """Statistics that no norm could have by accident, set in the module and returned as graph inputs."""
    generator = torch.Generator().manual_seed(seed)
    feed: Arrays = {}
    for path, norm in _norms(module):
        norm.running_mean = torch.randn(norm.running_mean.shape, generator=generator) * 0.1
        norm.running_var = torch.rand(norm.running_var.shape, generator=generator) + 0.5
        feed[statistic_mean(path)] = norm.running_mean.numpy()
        feed[statistic_variance(path)] = norm.running_var.numpy()
    return feed


def run_session(session: onnxruntime.InferenceSession, feed: Mapping[str, NDArray[Any]]) -> Arrays:
    """Run a graph once.

    Args:
        session: the graph.
        feed: arrays for all its inputs by name; what it does not take is left out.

    Returns:
        Its outputs by name.
    """
    taken: Sequence[str] = [i.name for i in session.get_inputs()]
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(names, {n: feed[n] for n in taken}), strict=True))
