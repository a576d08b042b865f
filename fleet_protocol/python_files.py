"""Runs Python files of the user as modules, with the files beside them importable."""

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from fleet_protocol.errors import ConfigError

MODULE_PREFIX = "shoal_file_"
"""Beginning of the names of modules that are files of the user."""


def run_file(path: Path, kind: str) -> ModuleType:
    """Run a Python file, and return it as a module.

    Files in its folder can be imported, as from a script; an installed package of the same name
    comes first.

    Args:
        path: of the file.
        kind: what the file is for, as a part of the module's name.

    Raises:
        ConfigError: its name does not end in ``.py``; or a file beside it has the name of one that
            was imported from another folder, which Python would import instead.
        Exception: whatever the file raises.
    """
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    name = f"{MODULE_PREFIX}{kind}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError("it is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    folder = path.resolve().parent
    _check_beside(folder)
    # Dataclasses and pickling look their module up by name, so it has to be there while it runs.
    sys.modules[name] = module
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    spec.loader.exec_module(module)
    return module


def _check_beside(folder: Path) -> None:
    """Check that no file of a folder has the name of a module from another folder of the user."""
    run_before = [name for name in sys.modules if name.startswith(MODULE_PREFIX)]
    other_folders = {_file_of(name).parent for name in run_before} - {folder}
    for file in sorted(folder.glob("*.py")):
        if file.stem not in sys.modules:
            continue
        imported = _file_of(file.stem)
        if imported.parent in other_folders:
            raise ConfigError(
                f"{file} and {imported} have one name, and Python imports only the first of them: "
                "rename one"
            )


def _file_of(name: str) -> Path:
    """Return the file of an imported module; an empty path for one without a file."""
    return Path(getattr(sys.modules[name], "__file__", None) or "").resolve()
