"""Compares what exported graphs return with PyTorch; one that does not agree is not published.

PyTorch here is eager autograd of the module as it was written, and PyTorch's own optimizer and
loss. The trace is never used as its own witness: lowerings, rewrites and operators of our own would
all agree with themselves.

A step can be ill-conditioned, as with layer norms over a few units: PyTorch in float32 is then as
far from PyTorch in float64 as a graph may be from either. So where float32 does not agree, float64
decides (`repeated`).
"""

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray

from fleet_protocol.errors import ExportError
from fleet_protocol.manifest import CheckSpec
from fleet_protocol.onnx_runtime import check_runtime
from trainer_export.batches import SizedBatches

LIMIT = 1e-4
"""Largest relative deviation of a tensor from PyTorch that is published."""

_ROUNDINGS = 5  # a tensor may be off float64 by so many times what PyTorch in float32 is,
_LOOSEST = 1e-2  # but never by more than this
# A tensor counts as at least this share of the largest of its kind: zero gradients have no scale.
_FLOOR = 0.1
_TRIES = 5

Arrays = dict[str, NDArray[Any]]


def _largest(value: NDArray[Any]) -> float:
    """Return the largest magnitude, not a number where one is, without a copy of a large tensor."""
    return float(np.maximum(value.max(), -value.min())) if value.size else 0.0


def _deviation(value: NDArray[Any], reference: NDArray[Any]) -> float:
    """Return the largest difference, infinite where one is not a number."""
    with np.errstate(invalid="ignore"):
        deviation = _largest(value - reference)
    return deviation if np.isfinite(deviation) else float("inf")


@dataclass
class Worst:
    """The largest deviation seen so far, by what is allowed."""

    absolute: float = 0.0
    relative: float = 0.0
    allowed: float = LIMIT
    tensor: str = ""
    sizes: list[int] = field(default_factory=list)

    def compare(
        self,
        outputs: Mapping[str, NDArray[Any]],
        expected: Mapping[str, NDArray[Any]],
        exact: Mapping[str, NDArray[Any]] | None = None,
        kind: str = "",
    ) -> None:
        """Add the deviations of tensors of one kind.

        Args:
            outputs: of the graph, these tensors among them.
            expected: what they should be.
            exact: the same in float64, which then decides.
            kind: put before a tensor's name in messages.
        """
        truth = expected if exact is None else exact
        sizes = {}
        for name, value in truth.items():
            sizes[name] = _largest(value)
        largest = max(sizes.values(), default=0.0)
        for name, reference in truth.items():
            absolute = _deviation(outputs[name], reference)
            scale = max(sizes[name], _FLOOR * largest, 1e-12)
            allowed = LIMIT
            if exact is not None:
                allowed = _limit_by_rounding(_deviation(expected[name], reference) / scale)
            self.absolute = max(self.absolute, absolute)
            if absolute / scale / allowed > self.relative / self.allowed or not self.tensor:
                self.relative = absolute / scale
                self.allowed = allowed
                self.tensor = kind + name

    def report(self, graph: str, steps: int) -> CheckSpec:
        """Return the figures.

        Raises:
            ExportError: a tensor, which the message names, is beyond its limit.
        """
        if self.relative > self.allowed or not np.isfinite(self.relative):
            raise ExportError(
                f"{graph} does not agree with PyTorch: {self.tensor} is off by {self.relative:.1e}"
                f" of its largest value (limit {self.allowed:.0e}); nothing is published. This is a"
                " fault of a lowering: report it with the model"
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


def _limit_by_rounding(rounding: float) -> float:
    """Return what is allowed where PyTorch itself is off by so much in float32."""
    if not np.isfinite(rounding):
        return LIMIT
    return max(LIMIT, min(_ROUNDINGS * rounding, _LOOSEST))


class Session(Protocol):
    """What is called as a session of onnxruntime is."""

    def get_inputs(self) -> Sequence[Any]:
        """Return what it takes, with names."""

    def get_outputs(self) -> Sequence[Any]:
        """Return what it returns, with names."""

    def run(self, names: Sequence[str], feed: Mapping[str, NDArray[Any]]) -> Sequence[NDArray[Any]]:
        """Return the outputs of these names."""


def open_session(model: bytes | Session, threads: int = 1) -> Session:
    """Open a session on the processor that only reports errors.

    One of another runtime is returned as it is.

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
    # What a run took is free after it.
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
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

    For a few small steps its threads cost more than they bring, more so on a busy machine.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def repeated(run: Callable[[SizedBatches, bool], CheckSpec], batches: SizedBatches) -> CheckSpec:
    """Return the report of the first run, of some with other random batches, within the limit.

    A difference in rounding may flip a ReLU or the larger of two nearly equal maxima, which no
    limit on a single run can tell from a small fault; so a run that deviates is repeated with other
    random batches. If all do, they are repeated with float64 to decide.

    Args:
        run: compares on some batches; the second argument is whether float64 decides.
        batches: of the first run.

    Raises:
        ExportError: every run deviates, as with a fault.
    """
    attempts = [(exact, attempt) for exact in (False, True) for attempt in range(_TRIES)]
    for exact, attempt in attempts[:-1]:
        with contextlib.suppress(ExportError):
            return run(batches.again(attempt), exact)
    exact, attempt = attempts[-1]
    return run(batches.again(attempt), exact)


def run_session(session: Session, feed: Mapping[str, NDArray[Any]]) -> Arrays:
    """Run a graph once.

    Args:
        session: of the graph.
        feed: arrays by name, its inputs among them.

    Returns:
        Its outputs by name.
    """
    inputs = {}
    for port in session.get_inputs():
        inputs[port.name] = feed[port.name]
    names = [port.name for port in session.get_outputs()]
    outputs = session.run(names, inputs)
    _release_freed_memory()
    return dict(zip(names, outputs, strict=True))


def _release_freed_memory() -> None:
    """Return to the system what a run freed: PyTorch's step needs as much again.

    The C library would keep it.
    """
    with contextlib.suppress(OSError, AttributeError):  # another system's library
        ctypes.CDLL(None).malloc_trim(0)
