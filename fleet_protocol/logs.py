"""What a process logs on standard error: lines for people, or with ``SHOAL_LOG=json`` an object a line with its ids."""

import json
import logging
import os

from typing_extensions import override

IDS = ("device", "round", "task")
"""What a line is about, where it is known; of a record by ``extra``."""


class _Json(logging.Formatter):
    @override
    def format(self, record: logging.LogRecord) -> str:
        found = {name: getattr(record, name, None) for name in IDS}
        said = {"at": record.created, "level": record.levelname.lower(), "logger": record.name, **found}
        said["message"] = getattr(record, "said", None) or record.getMessage()
        if record.exc_info:
            said["error"] = self.formatException(record.exc_info)
        return json.dumps({name: value for name, value in said.items() if value is not None}, ensure_ascii=False)


def log_to_stderr(level: int, line: str) -> None:
    """Log what is of this level or above; `line` is the form of those for people. Nothing where a log is set up."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if os.environ.get("SHOAL_LOG") == "json" else logging.Formatter(line))
    logging.basicConfig(level=level, handlers=[handler])
