"""The runs of a store: begun with their initial version, ended once, and looked up."""

import logging
import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import insert, or_, select, text, update

from broker_server.store import schema
from broker_server.store.configurations import is_run_name, save_config
from broker_server.store.event_table import EventTable
from broker_server.store.records import RunRecord, VersionRecord
from broker_server.store.rows import from_row, to_row
from fleet_protocol.errors import ConfigError

_LOG = logging.getLogger(__name__)

UNFINISHED = ("running", "paused")
# By the order of insertion: the clock of an earlier run may have been fast.
_NEWEST_FIRST = text("rowid DESC")


class RunTable(EventTable):
    """The runs of a store."""

    def add_run(
        self,
        run: RunRecord,
        first: VersionRecord,
    ) -> None:
        """Begin a run with its initial version, and the caller's own configuration."""
        # Saved before the row exists, so that no run lacks its configuration.
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

    def require_free_name(self, name: str) -> None:
        """Check that no run has a name yet, neither as its name nor as its id.

        Raises:
            ConfigError: one has; the message names it, and says what to do.
        """
        columns = schema.runs.c
        query = select(schema.runs).where(or_(columns.name == name, columns.id == name))
        taken = self._first(RunRecord, query)
        if taken is not None:
            raise ConfigError(
                f"run {taken.id} of {self.folder} already has the name {name}; choose another "
                f"name, or rename that run with `shoal rename {taken.id} NAME`"
            )

    def rename_run(
        self,
        run: str,
        name: str,
    ) -> None:
        """Give a run another name.

        Raises:
            ConfigError: another run has it.
        """
        record = self.run(run)
        if record is not None and record.name == name:
            return
        self.require_free_name(name)
        self._set_run(run, name=name)
        self.log("run-renamed", f"the run has the name {name}", run=run)

    def reopen_run(self, run: str) -> None:
        """Record that an ended run continues."""
        self._set_run(run, status="running", detail=None, ended_at=None)

    def set_status(
        self,
        run: str,
        status: str,
    ) -> None:
        """Record that an unfinished run is held, or continues."""
        self._set_run(run, status=status)

    def record_request(
        self,
        run: str,
        detail: str | None,
    ) -> None:
        """Record an operator's request about a run that has not ended, for a server that restarts.

        Args:
            run: id of the run.
            detail: the request in words; None if the run should continue.
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

        A run whose id is not a valid name is ignored: see `invalid_run_ids`.
        """
        for row in self._unfinished_rows(fleet):
            # Checked before the row is read: a changed id must not keep the server from starting.
            if is_run_name(row.id):
                return from_row(RunRecord, row)
        return None

    def invalid_run_ids(self, fleet: str) -> list[str]:
        """Return ids of unfinished runs that no server resumes, as no server gives such ids."""
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
            # For the terminal now, and for the page later.
            _LOG.warning(problem)
            self.log("configuration-unsigned", problem, run=run)
