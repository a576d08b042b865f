"""Opens graphs with onnxruntime, which is imported when the first one is run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from fleet_protocol.errors import BlobError, DataError
from fleet_protocol.onnx_runtime import load_runtime

_MISSING = "evaluating needs onnxruntime: pip install 'shoal[server]' (or 'shoal[server-training]')"


def open_graph(path: Path, *, threads: int = 0) -> Any:
    """Open an ONNX graph as an ``onnxruntime.InferenceSession``; with 0 threads an operator takes every core.

    Raises:
        ConfigError: onnxruntime is not installed, or twice.
        BlobError: the file is no graph that it can run.
    """
    runtime = load_runtime(_MISSING)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # Idle worker threads that spin would take the cores from devices on the same machine.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own exceptions share no public base class
        raise BlobError(f"onnxruntime cannot open {path}: {error}") from error


def run_graph(session: Any, names: Sequence[str], inputs: Mapping[str, NDArray[Any]], source: str) -> list[Any]:
    """Run an opened graph; where it does not run on samples of a source, a token beyond its table say, a DataError."""
    try:
        found: list[Any] = session.run(names, inputs)
    except Exception as error:  # as above
        raise DataError(f"the graph does not run on samples of {source}: {error}") from error
    return found
