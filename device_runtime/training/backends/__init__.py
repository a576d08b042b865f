"""Training backends: the portable step on stock onnxruntime, or that of onnxruntime-training.

One session class runs both.
"""

from device_runtime.board import installed_backends
from device_runtime.training.backends.forward import ForwardSession as ForwardSession
from device_runtime.training.backends.lower_part import LowerGraph as LowerGraph
from device_runtime.training.backends.pair import PairSession as PairSession
from device_runtime.training.backends.runtime import load_runtime as load_runtime
from device_runtime.training.backends.session import Sessions as Sessions
from device_runtime.training.backends.session import TrainSession as TrainSession
from device_runtime.training.backends.session import step_graph_key as step_graph_key
from device_runtime.training.backends.session import step_in_parts as step_in_parts
from fleet_protocol.errors import ConfigError


def choose_backend(wanted: str) -> str:
    """Return the training backend of a device, by name or ``auto``, without importing it.

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
