"""Detects files of the user that shadow Shoal's packages.

It uses only the standard library, because it runs before anything of Shoal is imported.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

OWN_PACKAGES = (
    "broker_server",
    "device_runtime",
    "fleet_protocol",
    "models",
    "reproduction",
    "simulation",
    "trainer_export",
)
_ROOT = Path(__file__).resolve().parents[1]


def hidden_package() -> str:
    """Return which file shadows a package of Shoal and what to do; empty if no file does."""
    for name in OWN_PACKAGES:
        origin = _origin(name)
        # A namespace package has no origin: a folder of that name without files hides nothing.
        if origin is None or origin.resolve() == _ROOT / name / "__init__.py":
            continue
        to_rename = origin.parent if origin.name == "__init__.py" else origin
        return (
            f"{origin} shadows the package `{name}` of Shoal in {_ROOT}: rename"
            f" {to_rename.name}, or remove {to_rename.parent} from Python's path"
        )
    return ""


def _origin(name: str) -> Path | None:
    """Return the file that Python imports under a name; None for a folder without a file."""
    # An imported module counts, whatever a search would find now.
    loaded = sys.modules.get(name)
    if loaded is not None:
        return Path(loaded.__file__) if loaded.__file__ else None
    spec = find_spec(name)
    return Path(spec.origin) if spec is not None and spec.origin else None


def leave_working_folder() -> None:
    """Remove the working folder, which ``python -m`` inserted, from Python's path.

    The folder stays if it contains Shoal itself, as in a checkout.
    """
    if getattr(sys.flags, "safe_path", False):
        return  # Python did not insert it
    if Path(sys.path[0] or ".").resolve() != _ROOT:
        del sys.path[0]
