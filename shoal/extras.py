"""The error of a command whose extra is not installed."""

from collections.abc import Iterator
from contextlib import contextmanager

from fleet_protocol.errors import ConfigError


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Wrap imports of packages from an extra, or from several separated by commas.

    Raises:
        ConfigError: a package is not installed; the message gives the command that installs it.

    Example:
        >>> with needs("server"):
        ...     import no_such_package
        Traceback (most recent call last):
        ...
        fleet_protocol.errors.ConfigError: no_such_package is not installed here: pip install
            'shoal[server]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        # The package, not the submodule that the import names.
        package = (error.name or str(error)).partition(".")[0]
        raise ConfigError(
            f"{package} is not installed here: pip install 'shoal[{extra}]'"
        ) from error
