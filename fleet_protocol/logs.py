"""Logs on standard error: lines for people, or with ``SHOAL_LOG=json`` a JSON object a line."""

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
"""Attributes of a log record, set by ``extra``, that name the subject of a line."""

_JOURNAL = "/run/systemd/journal/socket"
_PRIORITIES = {"DEBUG": 7, "INFO": 6, "WARNING": 4}  # of syslog
_ERROR_PRIORITY = 3


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
    """A message is a JSON object on one line, with its ids."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "at": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        for name in IDS:
            fields[name] = getattr(record, name, None)
        fields["message"] = getattr(record, "said", None) or record.getMessage()
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        # A line has only the ids that apply.
        present = {name: value for name, value in fields.items() if value is not None}
        text = json.dumps(present, ensure_ascii=False)
        # JSON escapes only ASCII control characters; others could move the cursor, too.
        return "".join(
            letter if letter.isprintable() else json.dumps(letter)[1:-1] for letter in text
        )


class _Journald(logging.Handler):
    """Sends each line to systemd's journal, with its level and ids as fields.

    They can select lines: ``journalctl -p warning SHOAL_ROUND=3``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.connect(_JOURNAL)

    @override
    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = {
            "MESSAGE": self.format(record),
            "PRIORITY": _PRIORITIES.get(record.levelname, _ERROR_PRIORITY),
            "SYSLOG_IDENTIFIER": "shoal",
        }
        for name in IDS:
            if hasattr(record, name):
                fields[f"SHOAL_{name.upper()}"] = getattr(record, name)
        datagram = b""
        for name, value in fields.items():
            data = str(value).encode()
            # With its length a value may contain line ends.
            datagram += b"%s\n%s%s\n" % (name.encode(), struct.pack("<Q", len(data)), data)
        with contextlib.suppress(OSError):  # the journal is restarting
            self._socket.send(datagram)


def log_to_stderr(level: int, line: str) -> None:
    """Log messages of a level or above on standard error, unless logging is already set up.

    Args:
        level: lowest level.
        line: format of the lines for people.
    """
    handler: logging.Handler = logging.StreamHandler()
    with contextlib.suppress(OSError, AttributeError):  # there is no journal
        status = os.fstat(2)
        if os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}":
            handler = _Journald()
            line = "%(message)s"
    handler.setFormatter(_Json() if os.environ.get("SHOAL_LOG") == "json" else _Lines(line))
    logging.basicConfig(level=level, handlers=[handler])
