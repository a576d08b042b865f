"""Training backends: the portable step on stock onnxruntime, or the step of onnxruntime-training.

One session class.
"""

from device_runtime.board import installed_backends
from device_runtime.training.backends.pair import PairSession as PairSession
from device_runtime.training.backends.runtime import load_runtime as load_runtime
from device_runtime.training.backends.session import ForwardSession as ForwardSession
from device_runtime.training.backends.session import Sessions as Sessions
from device_runtime.training.backends.session import TrainSession as TrainSession
from device_runtime.training.backends.session import step_graph_key as step_graph_key
from fleet_protocol.errors import ConfigError


def choose_backend(wanted: str) -> str:
    """Settle which backend a device trains with, by its name or ``auto``.

    Nothing is imported for it.

    Raises:
        ConfigError: it is not installed.
    """
    installed = installed_backends()
    if wanted == "auto":
        wanted = "ort-training" if "ort-training" in installed else "onnx"
    if wanted not in installed:
        extra = "device-training" if wanted == "ort-training" else "device"
        raise ConfigError(
            f"backend {wanted!r} is not installed on this board (installed: {', '.join(installed) or 'none'}): "
            f"pip install 'shoal[{extra}]'"
        )
    return wanted
