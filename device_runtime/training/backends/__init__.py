"""Training backends: the portable step on stock onnxruntime, or the step of onnxruntime-training; one session class."""

from device_runtime.board import installed_backends
from device_runtime.training.backends.pair import PairSession
from device_runtime.training.backends.runtime import load_runtime, settle_allocator
from device_runtime.training.backends.session import ForwardSession, Sessions, TrainSession, step_graph_key
from fleet_protocol.errors import ConfigError

__all__ = [
    "ForwardSession",
    "PairSession",
    "Sessions",
    "TrainSession",
    "choose_backend",
    "load_runtime",
    "settle_allocator",
    "step_graph_key",
]


def choose_backend(wanted: str) -> str:
    """Settle which backend a device trains with; nothing is imported for it.

    Args:
        wanted: ``onnx``, ``ort-training`` or ``auto``.

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
