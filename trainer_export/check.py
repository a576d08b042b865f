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
# a tensor counts as at least this share of the largest of its kind: zero gradients have no scale
_FLOOR = 0.1
_TRIES = 5

Arrays = dict[str, NDArray[Any]]


def _largest(value: NDArray[Any]) -> float:
    """The largest magnitude, not a number where one is, without a copy of a large tensor."""
    return float(np.maximum(value.max(), -value.min())) if value.size else 0.0


def _apart(one: NDArray[Any], other: NDArray[Any]) -> float:
    with np.errstate(invalid="ignore"):
        found = _largest(one - other)
    return found if np.isfinite(found) else float("inf")


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
        found: Mapping[str, NDArray[Any]],
        expected: Mapping[str, NDArray[Any]],
        exact: Mapping[str, NDArray[Any]] | None = None,
        kind: str = "",
    ) -> None:
        """Take tensors of one kind into account.

        `exact` are the expected ones in float64, which then decide.
        """
        truth = expected if exact is None else exact
        sizes = {name: _largest(value) for name, value in truth.items()}
        largest = max(sizes.values(), default=0.0)
        for name, reference in truth.items():
            absolute = _apart(found[name], reference)
            allowed = LIMIT
            scale = max(sizes[name], _FLOOR * largest, 1e-12)
            if exact is not None:
                rounding = _apart(expected[name], reference) / scale
                allowed = (
                    max(LIMIT, min(_ROUNDINGS * rounding, _LOOSEST))
                    if np.isfinite(rounding)
                    else LIMIT
                )
            self.absolute = max(self.absolute, absolute)
            if absolute / scale / allowed > self.relative / self.allowed or not self.tensor:
                self.relative = absolute / scale
                self.allowed = allowed
                self.tensor = kind + name

    def report(self, graph: str, steps: int) -> CheckSpec:
        """The figures, or an error that names the tensor."""
        if self.relative > self.allowed or not np.isfinite(self.relative):
            raise ExportError(
                f"{graph} does not agree with PyTorch: {self.tensor} is off by {self.relative:.1e} of its largest value"
                f" (limit {self.allowed:.0e}); nothing is published. This is a fault of a lowering: report it with the"
                " model"
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


class Session(Protocol):
    """What is called as a session of onnxruntime is."""

    def get_inputs(self) -> Sequence[Any]:
        """What it takes, with names."""

    def get_outputs(self) -> Sequence[Any]:
        """What it returns, with names."""

    def run(self, names: Sequence[str], feed: Mapping[str, NDArray[Any]]) -> Sequence[NDArray[Any]]:
        """The outputs of these names."""


def open_session(model: bytes | Session, threads: int = 1) -> Session:
    """A session on the processor that only reports errors, or that of another runtime as it is.

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
    options.enable_cpu_mem_arena = options.enable_mem_pattern = (
        False  # what a run took is free after it
    )
    try:
        session: Session = onnxruntime.InferenceSession(
            model, options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:
        raise ExportError(
            f"onnxruntime {onnxruntime.__version__} refuses the exported graph: {error}"
        ) from error
    return session


@contextlib.contextmanager
def calm_torch() -> Iterator[None]:
    """PyTorch on one thread: for a few small steps its threads cost more than they bring, more so
    on a busy machine.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def repeated(run: Callable[[SizedBatches, bool], CheckSpec], batches: SizedBatches) -> CheckSpec:
    """The report of the first of a few runs, with other random batches each, that is within the
    limit.

    A difference in rounding may flip a ReLU or the larger of two nearly equal maxima, which no
    limit on a single run can tell from a small fault; so a run that deviates is repeated with other
    random batches. If all do, they are repeated with float64 to decide, of which a run is told. A
    fault deviates in every run, which is an ExportError.
    """
    *tries, last = [(exact, attempt) for exact in (False, True) for attempt in range(_TRIES)]
    for exact, attempt in tries:
        with contextlib.suppress(ExportError):
            return run(batches.again(attempt), exact)
    return run(batches.again(last[1]), last[0])


def run_session(session: Session, feed: Mapping[str, NDArray[Any]]) -> Arrays:
    """Run a graph once on arrays by name, of which it takes its inputs.

    Returns its outputs by name.
    """
    taken = [i.name for i in session.get_inputs()]
    names = [o.name for o in session.get_outputs()]
    outputs = session.run(names, {n: feed[n] for n in taken})
    _give_back()
    return dict(zip(names, outputs, strict=True))


def _give_back() -> None:
    """Return to the system what a run freed, as the C library would not yet: PyTorch's step needs
    as much again.
    """
    with contextlib.suppress(OSError, AttributeError):  # another system's library
        ctypes.CDLL(None).malloc_trim(0)
