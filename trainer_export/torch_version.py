"""Refuses a PyTorch whose programs the exporter does not know."""

from importlib.metadata import version

from fleet_protocol.errors import ConfigError

FIRST = (2, 11)
"""The oldest minor release that pyproject.toml allows."""
LAST = (2, 13)
"""The newest one, with which the tests run."""


def require_known_torch() -> None:
    """Check that the installed PyTorch is one that the exporter supports.

    Raises:
        ConfigError: it is older or newer; the message has the range.
    """
    installed = version("torch")
    major, minor = installed.split(".")[:2]
    if FIRST <= (int(major), int(minor)) <= LAST:
        return
    first = ".".join(map(str, FIRST))
    last = ".".join(map(str, LAST))
    raise ConfigError(
        f"torch {installed} is installed, and exports work with torch {first} to {last}: "
        f"pip install 'torch>={first},<{LAST[0]}.{LAST[1] + 1}'"
    )
