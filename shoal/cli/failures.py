"""Prints why a command ends, and where the traceback is that one line does not show."""

import logging
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from traceback import walk_tb

from fleet_protocol.errors import ShoalError
from shoal.cli.console import error_console, print_error
from shoal.packages import OWN_PACKAGES

_LOG = logging.getLogger(__name__)
_ROOT = Path(__file__).resolve().parents[2]
_PYTHON = ("stdlib", "platstdlib", "purelib", "platlib")
_TRACEBACK_OPTION = "-vv"


def print_failure(error: ShoalError) -> None:
    """Print the message of an error, and log its traceback for who debugs."""
    message = str(error)
    print_error(message)
    _LOG.debug("traceback of this error", exc_info=error)
    # At -vv the log line above has printed the traceback already.
    is_hidden = not _LOG.isEnabledFor(logging.DEBUG)
    # A message that mentions the option itself needs no second hint.
    if is_hidden and _TRACEBACK_OPTION not in message and _passed_user_code(error):
        error_console().print(
            "`shoal -vv`, with the rest of the command as it was, shows the traceback",
            highlight=False,
        )


def _passed_user_code(error: BaseException) -> bool:
    """Return whether an error that Shoal has not raised came through code that is not installed."""
    installed = _installed_folders()
    for file in _files_of(error):
        # Names like <string> and <frozen importlib> are not files.
        if not file.name.startswith("<") and not installed.intersection(file.parents):
            return True
    return False


def _installed_folders() -> frozenset[Path]:
    """Return the folders of Python, of its packages, and of Shoal."""
    folders = {_ROOT / name for name in ("shoal", *OWN_PACKAGES)}
    paths = sysconfig.get_paths()
    for name in _PYTHON:
        folders.add(Path(paths[name]))
        # A virtual environment may reach these folders over a link.
        folders.add(Path(paths[name]).resolve())
    return frozenset(folders)


def _files_of(error: BaseException) -> Iterator[Path]:
    """Yield the files of the frames that the causes of an error passed through.

    One of Shoal's own errors says what is wrong and what to do, so its traceback is not needed.
    """
    current: BaseException | None = error
    while current is not None:
        if not isinstance(current, ShoalError):
            for frame, _line in walk_tb(current.__traceback__):
                yield Path(frame.f_code.co_filename)
        # An explicit cause has priority, as in Python's own tracebacks.
        current = current.__cause__ or current.__context__
