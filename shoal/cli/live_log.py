"""A log as people watch it: on a terminal the newest event in one line, warnings above it.

Elsewhere all lines.
"""

import contextlib
import logging
from collections.abc import Iterator

from rich.markup import escape
from rich.status import Status
from typing_extensions import override

from shoal.cli.console import error_console


class _Line(logging.Handler):
    """Shows what is as it should be in a status line, and prints the rest above it."""

    def __init__(self, status: Status) -> None:
        super().__init__()
        self._status = status

    @override
    def emit(self, record: logging.LogRecord) -> None:
        text = escape(self.format(record))
        if record.levelno >= logging.WARNING:
            self._status.console.print(
                f"[bold]{record.levelname.lower()}:[/] {text}",
                soft_wrap=True,
                highlight=False,
            )
        else:
            self._status.update(text)


@contextlib.contextmanager
def shown(name: str, *, quiet: bool, lines: bool = False) -> Iterator[None]:
    """Show a logger's events while something runs.

    With `lines` or ``shoal --verbose`` as lines on a terminal, too.

    Quietly it leaves out what is as it should be.
    """
    logger = logging.getLogger(name)
    console = error_console()
    lines = (
        lines or quiet or not console.is_terminal or logging.getLogger().isEnabledFor(logging.INFO)
    )
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    if lines:
        yield
        return
    with console.status("starting") as status:
        handler = _Line(status)
        logger.addHandler(handler)
        logger.propagate = False
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.propagate = True
