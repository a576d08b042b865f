"""Logs which Python files of the user a run uses, and which of them changed before it resumes."""

import logging
import sys
from collections.abc import Mapping
from pathlib import Path

from broker_server.settings.fleet import FleetConfig
from broker_server.store import Store
from broker_server.store.event_table import LineFilter
from fleet_protocol.digests import file_digest
from fleet_protocol.own_code import python_files_in

KIND = "own-code"
CHANGED = "own-code-changed"
"""Kinds of lines of the log."""

_MOST_FILES = 50  # that a line names
_BETWEEN = " has digest "
_SHOWN_DIGITS = 16
_LOG = logging.getLogger(__name__)


def log_own_code(store: Store, run: str, config: FleetConfig) -> None:
    """Log the digests of the user's Python files that a run uses, if they are not those of before.

    They are the files that the configuration names, and the modules beside them that are imported.
    A run that begins or resumes has loaded them.
    """
    digests = _digests(config)
    lines = store.events(run, last=1, matching=LineFilter(kinds=(KIND,)))
    detail = "; ".join(f"{path}{_BETWEEN}{digest}" for path, digest in digests.items())
    if lines and lines[0].detail != detail:
        changed = _differing(lines[0].detail, digests)
        why = f"run {run} resumes with different code than before: {', '.join(changed)} changed"
        _LOG.warning(why)
        store.log(CHANGED, why, run=run)
    if digests and (not lines or lines[0].detail != detail):
        store.log(KIND, detail, run=run)


def _digests(config: FleetConfig) -> Mapping[str, str]:
    files = {file.resolve() for file in python_files_in(config)}
    folders = {file.parent for file in files}
    for module in list(sys.modules.values()):
        source = getattr(module, "__file__", None)
        if source is None or not folders:
            continue
        path = Path(source)
        is_beside = any(path.is_relative_to(folder) for folder in folders)
        # The folder may hold an environment with installed packages.
        if is_beside and path.suffix == ".py" and "site-packages" not in path.parts:
            files.add(path)
    present = [path for path in sorted(files) if path.is_file()]
    return {str(path): file_digest(path)[-_SHOWN_DIGITS:] for path in present[:_MOST_FILES]}


def _differing(detail: str, digests: Mapping[str, str]) -> list[str]:
    """Return the files that differ from those of a line, or are in one of both only."""
    before = {}
    for entry in detail.split("; "):
        path, _, digest = entry.partition(_BETWEEN)
        before[path] = digest
    changed = []
    for path in sorted(before.keys() | digests.keys()):
        if before.get(path) != digests.get(path):
            changed.append(path)
    return changed
