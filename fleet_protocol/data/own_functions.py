"""Which Python functions a configuration file may name: those whose files lie in its own folder, or in one it lists."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from fleet_protocol.data.augment import file_of
from fleet_protocol.data.sources import Source
from fleet_protocol.errors import ConfigError
from fleet_protocol.frozen import FrozenModel


def functions_in(value: object) -> Iterator[str]:
    """The functions, ``file.py:function``, that the sources of data in a configuration name."""
    if isinstance(value, Source):
        yield from value.functions()
    elif isinstance(value, FrozenModel):
        for _, inner in value:
            yield from functions_in(inner)
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from functions_in(inner)


def require_own_functions(config: FrozenModel, path: Path, code: Iterable[Path]) -> None:
    """See that a configuration calls functions of its own folder alone, or of folders that it lists.

    Links count as what they lead to.

    Args:
        config: with absolute paths.
        path: its file.
        code: the folders that it lists, as absolute paths.

    Raises:
        ConfigError: a function lies elsewhere.
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
                f"{path} calls {name}, whose file lies in {real.parent}: only functions in the folder of the"
                f' configuration, {own}, run. Move the file there, or list its folder: code = ["{real.parent}"]'
            )
