"""What a process logs on standard error: lines for people, or with ``SHOAL_LOG=json`` an object a
line with its ids.
"""

import contextlib
import json
import logging
import os
import socket
import struct
import sys
from typing import Any

from typing_extensions import override

from fleet_protocol.errors import visible

IDS = ("device", "round", "task")
"""What a line is about, where it is known; of a record by ``extra``."""


_JOURNAL = "/run/systemd/journal/socket"


def print_line(text: str, *, error: bool = False) -> None:
    """Print text to standard output or error, without a console.

    It cannot move the cursor, see `visible`.
    """
    print(visible(text), file=sys.stderr if error else sys.stdout, flush=True)


class _Lines(logging.Formatter):
    """A message is one line, regardless of its content; a traceback follows on separate lines."""

    @override
    def formatMessage(self, record: logging.LogRecord) -> str:
        return visible(super().formatMessage(record), lines=False)

    @override
    def formatException(self, ei: Any) -> str:
        return visible(super().formatException(ei))


class _Json(logging.Formatter):
    @override
    def format(self, record: logging.LogRecord) -> str:
        found = {name: getattr(record, name, None) for name in IDS}
        said = {
            "at": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            **found,
        }
        said["message"] = getattr(record, "said", None) or record.getMessage()
        if record.exc_info:
            said["error"] = self.formatException(record.exc_info)
        told = json.dumps(
            {name: value for name, value in said.items() if value is not None},
            ensure_ascii=False,
        )
        return "".join(
            letter if letter.isprintable() else json.dumps(letter)[1:-1] for letter in told
        )


class _Journald(logging.Handler):
    """Gives systemd's journal each line with its level and ids as fields: ``journalctl -p warning
    SHOAL_ROUND=3``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.connect(_JOURNAL)

    @override
    def emit(self, record: logging.LogRecord) -> None:
        priority = {"DEBUG": 7, "INFO": 6, "WARNING": 4}.get(record.levelname, 3)
        fields = {
            "MESSAGE": self.format(record),
            "PRIORITY": priority,
            "SYSLOG_IDENTIFIER": "shoal",
        }
        fields |= {
            f"SHOAL_{name.upper()}": getattr(record, name) for name in IDS if hasattr(record, name)
        }
        said = [(name.encode(), str(value).encode()) for name, value in fields.items()]
        with contextlib.suppress(OSError):  # a journal that starts anew
            self._socket.send(
                b"".join(
                    b"%s\n%s%s\n" % (name, struct.pack("<Q", len(it)), it) for name, it in said
                )
            )


def log_to_stderr(level: int, line: str) -> None:
    """Log what is of this level or above; `line` is the form of those for people.

    Nothing where a log is set up.
    """
    handler: logging.Handler = logging.StreamHandler()
    with contextlib.suppress(OSError, AttributeError):  # no such socket, or a system that has none
        about = os.fstat(2)
        if os.environ.get("JOURNAL_STREAM") == f"{about.st_dev}:{about.st_ino}":
            handler = _Journald()
            line = "%(message)s"
    handler.setFormatter(_Json() if os.environ.get("SHOAL_LOG") == "json" else _Lines(line))
    logging.basicConfig(level=level, handlers=[handler])
