"""The runs of a store: begun with their initial version, ended once, and found again."""

import logging
import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import insert, select, text, update

from broker_server.store import schema
from broker_server.store.configurations import is_run_name, save_config
from broker_server.store.event_table import EventTable
from broker_server.store.records import RunRecord, VersionRecord
from broker_server.store.rows import from_row, to_row

_LOG = logging.getLogger(__name__)

UNFINISHED = ("running", "paused")
# By the order of insertion: the clock of an earlier run may have been ahead.
_NEWEST_FIRST = text("rowid DESC")


class RunTable(EventTable):
    """The runs of a store."""

    def add_run(
        self,
        run: RunRecord,
        first: VersionRecord,
    ) -> None:
        """Begin a run with its initial version, and the caller's own configuration."""
        problem = save_config(self.folder, run.id, run.config)
        with self._begin() as connection:
            connection.execute(insert(schema.runs).values(to_row(run)))
            connection.execute(insert(schema.versions).values(to_row(first)))
        self._log_unsigned(run.id, problem)

    def end_run(
        self,
        run: str,
        status: str,
        detail: str | None,
    ) -> None:
        """Record how a run ended."""
        self._set_run(
            run,
            status=status,
            detail=detail,
            ended_at=time.time(),
        )

    def reopen_run(self, run: str) -> None:
        """Record that a run which has ended goes on."""
        self._set_run(run, status="running", detail=None, ended_at=None)

    def set_status(
        self,
        run: str,
        status: str,
    ) -> None:
        """Record that a run which has not ended is held, or goes on."""
        self._set_run(run, status=status)

    def record_request(
        self,
        run: str,
        detail: str | None,
    ) -> None:
        """Record an operator's request about a run that has not ended, for a server that restarts.

        Args:
            run: id of the run.
            detail: the request in words; None: the run is to go on.
        """
        if detail is None:
            self._set_run(run, detail=None, status="running")
        else:
            self._set_run(run, detail=detail)

    def record_config(
        self,
        run: str,
        config: str,
    ) -> None:
        """Record the configuration with which a run resumes, which is the caller's own."""
        problem = save_config(self.folder, run, config)
        self._set_run(run, config=config)
        self._log_unsigned(run, problem)

    def add_bytes(
        self,
        run: str,
        *,
        wire: int,
        payload: int,
    ) -> None:
        """Add to a run's totals of bytes."""
        columns = schema.runs.c
        self._set_run(
            run,
            wire_bytes=columns.wire_bytes + wire,
            payload_bytes=columns.payload_bytes + payload,
        )

    def runs(self) -> list[RunRecord]:
        """Return every run, newest first."""
        return self._all(RunRecord, select(schema.runs).order_by(_NEWEST_FIRST))

    def run(self, run: str) -> RunRecord | None:
        """Return one run."""
        return self._first(RunRecord, select(schema.runs).where(schema.runs.c.id == run))

    def unfinished(self, fleet: str) -> RunRecord | None:
        """Return the newest run of a fleet that has not ended.

        A run whose id is no name does not count: see `invalid_run_ids`.
        """
        for row in self._unfinished_rows(fleet):
            if is_run_name(row.id):
                return from_row(RunRecord, row)
        return None

    def invalid_run_ids(self, fleet: str) -> list[str]:
        """Return ids of unfinished runs that no server resumes, since no server gives such ids."""
        ids = [row.id for row in self._unfinished_rows(fleet)]
        return [str(run) for run in ids if not is_run_name(run)]

    def _unfinished_rows(self, fleet: str) -> Sequence[Any]:
        """Return unchecked rows of the runs of a fleet that have not ended, newest first."""
        table = schema.runs
        query = select(table).where(table.c.fleet == fleet, table.c.status.in_(UNFINISHED))
        return self._rows(query.order_by(_NEWEST_FIRST))

    def _set_run(
        self,
        run: str,
        **values: object,
    ) -> None:
        self._write(update(schema.runs).where(schema.runs.c.id == run).values(**values))

    def _log_unsigned(
        self,
        run: str,
        problem: str | None,
    ) -> None:
        """Log that the configuration of a run could not be signed, and why."""
        if problem is not None:
            _LOG.warning(problem)
            self.log("configuration-unsigned", problem, run=run)
