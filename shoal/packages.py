"""Finds out whether Shoal's packages are hidden by files of the user that have the same names.

Only the standard library is used: this is asked before anything of Shoal is imported.
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
    """Return what hides one of the packages beside ``shoal`` and what to do; empty if none is."""
    for name in OWN_PACKAGES:
        origin = _origin(name)
        if origin is None or origin.resolve() == _ROOT / name / "__init__.py":
            continue
        to_rename = origin.parent if origin.name == "__init__.py" else origin
        return (
            f"{origin} hides the package `{name}` of Shoal, which is in {_ROOT}: rename "
            f"{to_rename.name}, or keep {to_rename.parent} out of Python's path"
        )
    return ""


def _origin(name: str) -> Path | None:
    """Return the file that Python imports under a name; None for a folder without one."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        return Path(loaded.__file__) if loaded.__file__ else None
    spec = find_spec(name)
    return Path(spec.origin) if spec is not None and spec.origin else None


def leave_working_folder() -> None:
    """Remove the working folder, which ``python -m`` put first, from Python's path.

    It stays where Shoal itself lies in it, as in a checkout.
    """
    if getattr(sys.flags, "safe_path", False):
        return  # Python did not put it there
    if Path(sys.path[0] or ".").resolve() != _ROOT:
        del sys.path[0]
