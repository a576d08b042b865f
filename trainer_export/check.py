"""Compares exported graphs with PyTorch; a graph that differs is not published.

The reference is eager autograd of the original module with PyTorch's own optimizer and loss. The
trace is never the reference, because lowerings, rewrites and custom operators would agree with
themselves.

A step can be ill-conditioned, for example with layer norms over a few units: PyTorch in float32
then differs from PyTorch in float64 as much as a graph from either. So if the comparison in float32
fails, float64 decides (`trainer_export.repeated_check`), at last for the graph as well
(`trainer_export.double_graph`).
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray

from fleet_protocol.allocator import release_freed_memory
from fleet_protocol.errors import ExportError
from fleet_protocol.manifest import CheckSpec
from fleet_protocol.onnx_runtime import check_runtime

LIMIT = 1e-4
"""Largest relative deviation of a tensor from PyTorch in a published graph."""

# If the graph is run in float64, too. Its constants are rounded to float32, and the transforms of
# Winograd's algorithm multiply their errors: 3e-6 was measured for half of a ResNet-18.
_LIMIT_IN_FLOAT64 = 1e-5
_ROUNDINGS = 5  # a tensor may differ from float64 by this multiple of PyTorch's float32 error,
_LOOSEST = 1e-2  # but never by more than this
# Smallest scale of a tensor, as a share of the largest of its kind: zero gradients have no scale.
_FLOOR = 0.1
# If a ReLU or a maximum decides differently, a few entries of a tensor deviate. They differ from
# batch to batch; those of a bug do not.
_EDGE_SHARE = 1e-2  # share of the entries of a tensor, at least one
_PIECE = 1_000_000  # entries of a tensor that are compared at once
_EDGE_LARGEST = 0.1  # how much they may deviate

Arrays = dict[str, NDArray[Any]]


class DeviationError(ExportError):
    """A graph does not agree with PyTorch.

    Attributes:
        worst: the deviations of the run.
        graph: its name.
        steps: steps of the run.
    """

    def __init__(
        self,
        message: str,
        worst: "WorstDeviation",
        graph: str,
        steps: int,
    ) -> None:
        super().__init__(message)
        self.worst = worst
        self.graph = graph
        self.steps = steps


def _largest(value: NDArray[Any]) -> float:
    """Return the largest magnitude (NaN if any entry is) without copying a large tensor."""
    return float(np.maximum(value.max(), -value.min())) if value.size else 0.0


def _differences(
    value: NDArray[Any], reference: NDArray[Any]
) -> Iterator[tuple[slice, NDArray[Any]]]:
    """Yield the differences of two tensors piece by piece, and where each piece lies.

    Those of a whole embedding would take as much memory as the rest of a check.
    """
    flat = value.reshape(-1)
    flat_reference = reference.reshape(-1)
    for first in range(0, flat.size, _PIECE):
        piece = slice(first, first + _PIECE)
        # The difference of two infinite values is not a number.
        with np.errstate(invalid="ignore"):
            difference = flat[piece] - flat_reference[piece]
        yield piece, difference


def _deviation(value: NDArray[Any], reference: NDArray[Any]) -> float:
    """Return the largest difference; infinite if any entry is NaN."""
    deviation = 0.0
    for _piece, difference in _differences(value, reference):
        largest = _largest(difference)
        if not np.isfinite(largest):
            return float("inf")
        deviation = max(deviation, largest)
    return deviation


@dataclass
class WorstDeviation:
    """The largest deviation so far, relative to its limit."""

    absolute: float = 0.0
    relative: float = 0.0
    allowed: float = LIMIT
    tensor: str = ""
    sizes: list[int] = field(default_factory=list)
    # by tensor and shape: which entries were beyond the limit in any step; the others' largest
    # deviation
    beyond: dict[tuple[str, tuple[int, ...]], NDArray[np.bool_]] = field(default_factory=dict)
    others: float = 0.0
    # the first tensor that has infinite values or NaN in PyTorch itself; empty if there is none
    not_finite: str = ""
    # what ran the graph, and whether it computed in float64
    runtime: str = f"onnxruntime {onnxruntime.__version__}"
    in_float64: bool = False

    def compare(
        self,
        outputs: Mapping[str, NDArray[Any]],
        expected: Mapping[str, NDArray[Any]],
        exact: Mapping[str, NDArray[Any]] | None = None,
        kind: str = "",
    ) -> None:
        """Add the deviations of tensors of one kind.

        Args:
            outputs: outputs of the graph, including these tensors.
            expected: the expected tensors.
            exact: the same in float64, which then decides.
            kind: prefix of a tensor's name in messages.
        """
        truth = expected if exact is None else exact
        sizes = {}
        for name, value in truth.items():
            sizes[name] = _largest(value)
        largest = max(sizes.values(), default=0.0)
        for name, reference in truth.items():
            if not self.not_finite and not np.isfinite(sizes[name]):
                self.not_finite = kind + name
            absolute = _deviation(outputs[name], reference)
            scale = max(sizes[name], _FLOOR * largest, 1e-12)
            allowed = LIMIT
            if exact is not None and self.in_float64:
                allowed = _LIMIT_IN_FLOAT64
            elif exact is not None:
                allowed = _limit_by_rounding(_deviation(expected[name], reference) / scale)
            self._note_entries(kind + name, outputs[name], reference, (scale, allowed))
            self.absolute = max(self.absolute, absolute)
            # Not divided where it is infinite: the scale may be infinite, or not a number.
            relative = absolute / scale if np.isfinite(absolute) else absolute
            if relative / allowed > self.relative / self.allowed or not self.tensor:
                self.relative = relative
                self.allowed = allowed
                self.tensor = kind + name

    def _note_entries(
        self, tensor: str, value: NDArray[Any], reference: NDArray[Any], limit: tuple[float, float]
    ) -> None:
        """Note which entries of a tensor deviate, and how far the others do.

        Args:
            tensor: its name.
            value: the tensor of the graph.
            reference: the expected tensor.
            limit: scale of its entries, and the largest relative deviation.
        """
        scale, allowed = limit
        for piece, difference in _differences(value, reference):
            relative = np.abs(difference) / scale
            is_beyond = ~(relative <= allowed)  # what is not a number is beyond
            if is_beyond.any():
                # The shape of an output depends on the number of samples.
                entry = (tensor, reference.shape)
                mask = self.beyond.setdefault(entry, np.zeros(reference.shape, np.bool_))
                mask.reshape(-1)[piece] |= is_beyond
            self.others = max(self.others, float(relative.max(initial=0.0, where=~is_beyond)))

    @property
    def is_small(self) -> bool:
        """Whether no entry deviates by more than a ReLU at its edge explains."""
        return self.relative <= _EDGE_LARGEST

    @property
    def has_few_beyond(self) -> bool:
        """Whether only a few entries of each tensor deviate, and not by much."""
        if not self.is_small:
            return False
        for mask in self.beyond.values():
            few = max(1, _EDGE_SHARE * mask.size)
            if mask.sum() > few:
                return False
        return True

    def is_refused(self, *, exact: bool) -> bool:
        """Return whether further steps of a run cannot change that it deviates.

        Args:
            exact: whether float64 decides; then a few entries at an edge may still be allowed.
        """
        if self.relative <= self.allowed:
            return False
        return not exact or not self.has_few_beyond

    def report(self, graph: str, steps: int) -> CheckSpec:
        """Return the figures.

        Raises:
            ExportError: a tensor exceeds its limit; the message names it.
        """
        if not np.isfinite(self.relative) and self.not_finite:
            raise DeviationError(
                f"{self.not_finite} of {graph} is not finite in PyTorch itself, so no graph can be"
                " compared with it; nothing is published. Look for NaN or infinite values in the"
                " initial weights, and for divisions, logarithms and roots near 0 in the model",
                self,
                graph,
                steps,
            )
        if self.relative > self.allowed or not np.isfinite(self.relative):
            raise DeviationError(
                f"{graph} differs from PyTorch: {self.tensor} deviates by {self.relative:.1e} of"
                f" its largest value (limit {self.allowed:.0e}); nothing is published. This is a"
                " bug in a lowering: please report it with the model",
                self,
                graph,
                steps,
            )
        return self._figures(graph, steps, self.relative, self.tensor)

    def report_others(self, graph: str, steps: int) -> CheckSpec:
        """Return the figures without the entries that deviate, and say how many those are."""
        count = sum(int(mask.sum()) for mask in self.beyond.values())
        return self._figures(
            graph,
            steps,
            self.others,
            f"{self.tensor} but {count} at an edge",
        )

    def _figures(
        self,
        graph: str,
        steps: int,
        relative: float,
        tensor: str,
    ) -> CheckSpec:
        return CheckSpec(
            graph=graph,
            runtime=self.runtime,
            steps=steps,
            batch_sizes=tuple(dict.fromkeys(self.sizes)),
            worst_absolute=self.absolute,
            worst_relative=relative,
            worst_tensor=tensor,
        )


def _limit_by_rounding(rounding: float) -> float:
    """Return the limit for a tensor for which PyTorch itself has this error in float32."""
    if not np.isfinite(rounding):
        return LIMIT
    return max(LIMIT, min(_ROUNDINGS * rounding, _LOOSEST))


class Session(Protocol):
    """The interface of a session of onnxruntime, and of `double_graph.DoubleSession`."""

    def get_inputs(self) -> Sequence[Any]:
        """Return the inputs with their names."""

    def get_outputs(self) -> Sequence[Any]:
        """Return the outputs with their names."""

    def run(
        self,
        names: Sequence[str],
        feed: Mapping[str, NDArray[Any]],
    ) -> Sequence[NDArray[Any]]:
        """Return the outputs with these names."""


def open_session(model: bytes | Session, threads: int = 1) -> Session:
    """Open a session on the processor that only reports errors.

    A session of another runtime is returned unchanged.

    Raises:
        ConfigError: two distributions of onnxruntime are installed.
        ExportError: the runtime refuses the graph.
    """
    if not isinstance(model, bytes):
        return model
    check_runtime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # The memory of a run is freed after it.
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    # The search for memory to reuse takes longer than a run: its time grows with the square of the
    # nodes. Without it, values are freed after their last use all the same.
    options.enable_mem_reuse = False
    try:
        session: Session = onnxruntime.InferenceSession(
            model,
            options,
            providers=["CPUExecutionProvider"],
        )
    except Exception as error:
        raise ExportError(
            f"onnxruntime {onnxruntime.__version__} refuses the exported graph: {error}"
        ) from error
    return session


@contextlib.contextmanager
def calm_torch() -> Iterator[None]:
    """Run PyTorch on one thread.

    For a few small steps, threads cost more than they gain, especially on a busy machine.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run_session(session: Session, feed: Mapping[str, NDArray[Any]]) -> Arrays:
    """Run a graph once.

    Args:
        session: session of the graph.
        feed: arrays by name, including the inputs.

    Returns:
        The outputs by name.
    """
    inputs = {}
    for port in session.get_inputs():
        inputs[port.name] = feed[port.name]
    names = [port.name for port in session.get_outputs()]
    # A graph's run needs as much memory as PyTorch's step before it, which has freed its own.
    release_freed_memory()
    outputs = session.run(names, inputs)
    release_freed_memory()
    return dict(zip(names, outputs, strict=True))
