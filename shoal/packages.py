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
    """What hides one of the packages that lie beside ``shoal``, and what to do.

    Empty if nothing does.
    """
    for name in OWN_PACKAGES:
        found = _origin(name)
        if found is not None and found.resolve() != _ROOT / name / "__init__.py":
            place = found.parent if found.name == "__init__.py" else found
            return (
                f"{found} hides the package `{name}` of Shoal, which is in {_ROOT}: rename {place.name}, or keep "
                f"{place.parent} out of Python's path"
            )
    return ""


def _origin(name: str) -> Path | None:
    loaded = sys.modules.get(name)
    if loaded is not None:
        return Path(loaded.__file__) if loaded.__file__ else None
    spec = find_spec(name)
    return Path(spec.origin) if spec is not None and spec.origin else None


def leave_working_folder() -> None:
    """Take the working folder, which ``python -m`` put first, from the path, unless Shoal itself
    lies there.
    """
    if not getattr(sys.flags, "safe_path", False) and Path(sys.path[0] or ".").resolve() != _ROOT:
        del sys.path[0]
