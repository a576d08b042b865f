"""The onnxruntime package: imported late, without torch, and from one distribution only.

onnxruntime and onnxruntime-training are the same import package; where both are installed each has
overwritten files of the other, and what runs is neither. The training one imports torch and onnx
where it finds them (its start-up check looks for ORTModule): 230 MB and a second that neither a
board nor a server must pay.
"""

import functools
import importlib
import sys
from importlib import metadata
from typing import Any, cast

from fleet_protocol.errors import ConfigError

# Whatever provides the import package. The training ones also run what the stock ones do, so they
# come first.
RUNTIMES = (
    "onnxruntime-training-cpu",
    "onnxruntime-training",
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-openvino",
)
_TRAINING_PACKAGE = "onnxruntime.training"


@functools.cache
def check_runtime() -> None:
    """See, without importing it, that onnxruntime is of one distribution at most.

    More are a ConfigError.
    """
    found = [name for name in RUNTIMES if any(True for _ in metadata.distributions(name=name))]
    if len(found) > 1:
        unwanted = " and ".join(found[1:])
        raise ConfigError(
            f"{' and '.join(found)} are installed together, but they are the same import package and have overwritten "
            f"each other's files: pip uninstall {' '.join(found)}, then install one of them again (for example "
            f"{found[0]}, without {unwanted})"
        )


def load_runtime(missing: str) -> Any:
    """The ``onnxruntime`` module, whichever distribution provides it, without torch or onnx.

    Or `missing` is said.

    That, or that there are several, or one cannot be imported, is a ConfigError.
    """
    if "onnxruntime" in sys.modules:
        return sys.modules["onnxruntime"]
    check_runtime()
    modules = cast("dict[str, Any]", sys.modules)
    try:
        # None makes the import system raise ImportError, which the start-up check takes for "no
        # ORTModule here".
        modules[_TRAINING_PACKAGE] = None
        return importlib.import_module("onnxruntime")
    except ModuleNotFoundError as error:
        if error.name != "onnxruntime":
            raise ConfigError(
                f"onnxruntime is installed, but it cannot be imported: {error}"
            ) from error
        raise ConfigError(missing) from error
    except ImportError as error:  # a library of the system, mostly, or files of another processor
        raise ConfigError(
            f"onnxruntime is installed, but it cannot be imported: {error}"
        ) from error
    finally:
        modules.pop(_TRAINING_PACKAGE, None)
