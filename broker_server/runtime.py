"""The onnxruntime package, imported when the first graph is run, and without torch.

The training flavour of the package imports torch and onnx where it finds them (its start-up check looks for
ORTModule); the server needs neither.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any, cast

from fleet_protocol.errors import BlobError, ConfigError

__all__ = ["open_graph"]

_TRAINING_PACKAGE = "onnxruntime.training"


def _load() -> Any:
    if "onnxruntime" in sys.modules:
        return sys.modules["onnxruntime"]
    modules = cast("dict[str, Any]", sys.modules)
    try:
        # None makes the import system raise ImportError, which the start-up check takes for "no ORTModule here".
        modules[_TRAINING_PACKAGE] = None
        return importlib.import_module("onnxruntime")
    except ImportError as error:
        raise ConfigError("evaluating needs onnxruntime: pip install 'shoal[server]'") from error
    finally:
        modules.pop(_TRAINING_PACKAGE, None)


def open_graph(path: Path, *, threads: int = 0) -> Any:
    """Open an ONNX graph.

    Args:
        path: the file.
        threads: threads of one operator; 0 takes every core.

    Returns:
        An ``onnxruntime.InferenceSession``.

    Raises:
        ConfigError: onnxruntime is not installed.
        BlobError: the file is no graph that it can run.
    """
    runtime = _load()
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # Idle worker threads that spin would take the cores from devices on the same machine.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own exceptions share no public base class
        raise BlobError(f"onnxruntime cannot open {path}: {error}") from error
