"""Refuses unsupported versions of PyTorch, and warns of untested ones."""

import logging
from functools import cache
from importlib.metadata import version

from fleet_protocol.errors import ConfigError

FIRST = (2, 11)
"""The oldest minor release that pyproject.toml allows."""
DEFAULT = (2, 13)
"""The minor release with which all tests run."""
TESTED = (DEFAULT, (2, 14))
"""The minor releases with which the tests of the exporter and the models have passed."""
LAST = (2, 15)
"""The newest minor release that pyproject.toml allows."""

_LOG = logging.getLogger(__name__)


def require_known_torch() -> None:
    """Check that the exporter supports the installed PyTorch, and warn if it was not tested.

    Raises:
        ConfigError: it is older or newer; the message gives the range.
    """
    installed = version("torch")
    numbers = installed.split(".")
    release = (int(numbers[0]), int(numbers[1]))
    if not FIRST <= release <= LAST:
        raise ConfigError(
            f"torch {installed} is installed, but the exporter supports torch {_text(FIRST)} to"
            f" {_text(LAST)}: pip install 'torch=={_text(DEFAULT)}.*'"
        )
    if release not in TESTED:
        _warn(installed)


@cache
def _warn(installed: str) -> None:
    # Once per process: a demo exports several models.
    _LOG.warning(
        "torch %s is installed, but Shoal was tested only with torch %s; every exported graph is"
        " still compared with PyTorch. If an export fails: pip install 'torch==%s.*'",
        installed,
        " and ".join(map(_text, TESTED)),
        _text(DEFAULT),
    )


def _text(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"
