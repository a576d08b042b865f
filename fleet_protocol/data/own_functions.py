"""Limits the Python functions that a configuration may name to certain folders.

These are its own folder, and folders that it lists.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from fleet_protocol.data.augment import file_of
from fleet_protocol.data.sources import Source
from fleet_protocol.errors import ConfigError
from fleet_protocol.frozen import FrozenModel


def functions_in(value: object) -> Iterator[str]:
    """Yield the functions, ``file.py:function``, that the data sources in a configuration name."""
    if isinstance(value, Source):
        yield from value.functions()
    elif isinstance(value, FrozenModel):
        for _, inner in value:
            yield from functions_in(inner)
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from functions_in(inner)


def require_own_functions(
    config: FrozenModel,
    path: Path,
    code: Iterable[Path],
) -> None:
    """Check that a configuration calls only functions in its own folder or in those that it lists.

    Links are resolved first.

    Args:
        config: the configuration with absolute paths.
        path: its file.
        code: folders that it lists, as absolute paths.

    Raises:
        ConfigError: a function is elsewhere.
    """
    own = path.resolve().parent
    folders = (own, *(folder.resolve() for folder in code))
    for name in functions_in(config):
        file = file_of(name)
        if file is None:
            continue
        real = file.resolve()
        if not any(real.is_relative_to(folder) for folder in folders):
            raise ConfigError(
                f"{path} calls {name}, whose file is in {real.parent}: only functions in the "
                f"folder of the configuration, {own}, run. Move the file there, or list its "
                f'folder: code = ["{real.parent}"]'
            )
