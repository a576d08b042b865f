"""Training backends: the portable step on stock onnxruntime, or that of onnxruntime-training.

One session class runs both.
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
    """Return which backend a device trains with, by its name or ``auto``; import nothing for it.

    Raises:
        ConfigError: it is not installed.
    """
    installed = installed_backends()
    if wanted == "auto":
        wanted = "ort-training" if "ort-training" in installed else "onnx"
    if wanted not in installed:
        extra = "device-training" if wanted == "ort-training" else "device"
        names = ", ".join(installed) or "none"
        raise ConfigError(
            f"backend {wanted!r} is not installed on this board (installed: {names}): "
            f"pip install 'shoal[{extra}]'"
        )
    return wanted
