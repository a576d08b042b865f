"""What to say where a command lacks the packages of its extra."""

from collections.abc import Iterator
from contextlib import contextmanager

from fleet_protocol.errors import ConfigError


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Import inside this what an extra, or several separated by commas, brings.

    Raises:
        ConfigError: a package is not installed; the message has the line that installs it.

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
        package = (error.name or str(error)).partition(".")[0]
        raise ConfigError(
            f"{package} is not installed here: pip install 'shoal[{extra}]'"
        ) from error
