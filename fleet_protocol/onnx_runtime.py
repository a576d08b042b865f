"""The onnxruntime package: imported late, without torch, and from one distribution only.

onnxruntime and onnxruntime-training are the same import package. If both are installed, each has
overwritten files of the other, and neither works. The training one imports torch and onnx if they
are installed (its start-up check looks for ORTModule), which would cost 230 MB and a second.
"""

import functools
import importlib
import sys
from importlib import metadata
from typing import Any, cast

from fleet_protocol.errors import ConfigError

# Distributions of the import package. The training ones also run what the others do, so they come
# first.
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
    """Check, without importing it, that at most one distribution of onnxruntime is installed.

    Raises:
        ConfigError: several are installed.
    """
    installed = [name for name in RUNTIMES if _is_installed(name)]
    if len(installed) > 1:
        first, *further = installed
        raise ConfigError(
            f"{' and '.join(installed)} are installed together, but they are the same import "
            f"package and have overwritten each other's files: pip uninstall "
            f"{' '.join(installed)}, then install one of them again (for example {first}, "
            f"without {' and '.join(further)})"
        )


def _is_installed(distribution: str) -> bool:
    return any(True for _ in metadata.distributions(name=distribution))


def load_runtime(missing: str) -> Any:
    """Return the module ``onnxruntime`` of any distribution, without torch or onnx.

    Args:
        missing: the message if it is not installed.

    Raises:
        ConfigError: it is not installed, is installed several times, or cannot be imported.
    """
    if "onnxruntime" in sys.modules:
        return sys.modules["onnxruntime"]
    check_runtime()
    modules = cast("dict[str, Any]", sys.modules)
    try:
        # None makes the import system raise an ImportError, from which the start-up check concludes
        # that there is no ORTModule.
        modules[_TRAINING_PACKAGE] = None
        return importlib.import_module("onnxruntime")
    except ModuleNotFoundError as error:
        if error.name != "onnxruntime":
            raise ConfigError(
                f"onnxruntime is installed, but it cannot be imported: {error}"
            ) from error
        raise ConfigError(missing) from error
    except ImportError as error:  # a missing system library, or files for another processor
        raise ConfigError(
            f"onnxruntime is installed, but it cannot be imported: {error}"
        ) from error
    finally:
        modules.pop(_TRAINING_PACKAGE, None)
