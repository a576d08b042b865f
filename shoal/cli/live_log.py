"""Shows a log: on a terminal, the newest event in one line with warnings above it.

Without a terminal, it prints all lines.
"""

import contextlib
import logging
from collections.abc import Iterator

from rich.markup import escape
from rich.status import Status
from typing_extensions import override

from shoal.cli.console import error_console


class _Line(logging.Handler):
    """Shows ordinary events in a status line, and prints warnings and errors above it."""

    def __init__(self, status: Status) -> None:
        super().__init__()
        self._status = status

    @override
    def emit(self, record: logging.LogRecord) -> None:
        # Device names and messages in an event must not count as rich's markup.
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
    """Show a logger's events while the block runs.

    With `lines` or ``shoal --verbose``, a terminal also shows one line for each event.

    With `quiet` it omits ordinary events.
    """
    logger = logging.getLogger(name)
    console = error_console()
    # A log that goes to a file, or that the user asked to see, stays one line for each event.
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
        # The root handler would print the same event below the status line.
        logger.propagate = False
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.propagate = True
