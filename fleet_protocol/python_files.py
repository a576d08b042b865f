"""Runs Python files of the user as modules, with the files beside them importable."""

import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from fleet_protocol.errors import ConfigError

MODULE_PREFIX = "shoal_file_"
"""Prefix of the names of modules that are files of the user."""


FUNCTION_PATTERN = r"^.+\.py:[A-Za-z_][A-Za-z0-9_]*$"
"""Name of a function of the user in a configuration."""
FUNCTION_RULE = "write file.py:function, as in my_data.py:load"

_SIGNAL_CODES = 128
"""Exit codes above this one are of signals, whose handlers end the process."""


@contextmanager
def refusing_exits() -> Iterator[None]:
    """Turn an exit that the user's function asks for into an error.

    Without it, ``sys.exit()`` in a function ends the command in silence, as if it had succeeded. A
    handler of a signal may end the process.

    Raises:
        RuntimeError: the function asks for an exit.
    """
    try:
        yield
    except SystemExit as error:
        if isinstance(error.code, int) and error.code > _SIGNAL_CODES:
            raise
        text = f"it ends the process by sys.exit({error.code!r}); return or raise an error instead"
        # With the user's frames, because messages name the line of the user's file.
        raise RuntimeError(text).with_traceback(error.__traceback__) from error


def run_file(path: Path, kind: str) -> ModuleType:
    """Run a Python file, and return it as a module.

    Files in its folder can be imported, as from a script; an installed package of the same name
    comes first.

    Args:
        path: path of the file.
        kind: purpose of the file, as a part of the module's name.

    Raises:
        ConfigError: its name does not end in ``.py``; it has a relative import; or a file beside it
            has the name of one that was imported from another folder, which Python would import
            instead.
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
    # Dataclasses and pickling look their module up by name, so it must be registered while it runs.
    sys.modules[name] = module
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        if "relative import" not in str(error):
            raise
        raise ConfigError(
            "it runs as a script, so it cannot import with a dot: write `import parts` instead of "
            "`from . import parts`"
        ) from error
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
                f"{file} and {imported} have the same module name, and Python imports only "
                "the first of them: rename one"
            )


def _file_of(name: str) -> Path:
    """Return the file of an imported module; an empty path for one without a file."""
    file = getattr(sys.modules[name], "__file__", None)
    # An empty path is not resolved, because it would become the working folder.
    return Path(file).resolve() if file else Path()
