"""Limits the Python files that a configuration may name to certain folders.

These are the configuration's own folder, and the folders that it lists.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from fleet_protocol.errors import ConfigError
from fleet_protocol.frozen import FrozenModel


def python_files_in(value: object) -> Iterator[Path]:
    """Yield the Python files that a configuration and its tables name."""
    if isinstance(value, FrozenModel):
        yield from value.python_files()
        for _, inner in value:
            yield from python_files_in(inner)
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from python_files_in(inner)


def require_own_code(
    config: FrozenModel,
    path: Path,
    code: Iterable[Path] | None,
) -> None:
    """Check that a configuration runs only files in its own folder or in those that it lists.

    Links are resolved first.

    Args:
        config: the configuration, or a table of it, with absolute paths.
        path: its file.
        code: folders that it lists, as absolute paths; None for a configuration without such a
            list.

    Raises:
        ConfigError: a file is elsewhere.
    """
    own = path.resolve().parent
    folders = [own]
    for folder in code or ():
        folders.append(folder.resolve())
    for file in python_files_in(config):
        real = file.resolve()
        if any(real.is_relative_to(folder) for folder in folders):
            continue
        remedy = "Move the file there"
        if code is not None:
            remedy += f', or list its folder: code = ["{real.parent}"]'
        raise ConfigError(
            f"{path} names {file}, which is in {real.parent}: only Python files in the "
            f"folder of the configuration, {own}, are run. {remedy}"
        )
