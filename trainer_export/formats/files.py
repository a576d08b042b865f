"""The output of a format: bytes with a path and, for a graph, a signature."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from fleet_protocol.errors import ExportError
from trainer_export.graph import Port


@dataclass(frozen=True)
class SetFile:
    """One file of an artifact set."""

    key: str  # in the manifest, such as `onnx/train`
    path: str  # relative to the tier's folder
    data: bytes
    inputs: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()  # outputs of a graph in order; empty for other files

    @property
    def is_graph(self) -> bool:
        """Whether this is a graph and not another file."""
        return bool(self.outputs)


@dataclass(frozen=True)
class GraphFile(SetFile):
    """A graph that is also available as a parsed model; ``data`` is its serialization."""

    model: onnx.ModelProto = field(default_factory=onnx.ModelProto)


class UnavailableError(ExportError):
    """A format does not support the model; the portable format does."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(
            f"the format {name} does not support this model: {reason}; the portable format does"
        )


@contextlib.contextmanager
def silent_stderr() -> Iterator[None]:
    """Suppress output that runtimes print regardless of logger settings; failures still raise."""
    kept = os.dup(2)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
