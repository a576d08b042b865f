"""Refuses unsupported versions of PyTorch."""

from importlib.metadata import version

from fleet_protocol.errors import ConfigError

FIRST = (2, 11)
"""The oldest minor release that pyproject.toml allows."""
LAST = (2, 13)
"""The newest supported minor release, with which the tests run."""


def require_known_torch() -> None:
    """Check that the exporter supports the installed PyTorch.

    Raises:
        ConfigError: it is older or newer; the message gives the range.
    """
    installed = version("torch")
    major, minor = installed.split(".")[:2]
    if FIRST <= (int(major), int(minor)) <= LAST:
        return
    first = ".".join(map(str, FIRST))
    last = ".".join(map(str, LAST))
    raise ConfigError(
        f"torch {installed} is installed, but the exporter supports torch {first} to {last}: pip"
        f" install 'torch>={first},<{LAST[0]}.{LAST[1] + 1}'"
    )
