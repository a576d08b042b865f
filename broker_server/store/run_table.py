"""Runs in the store: begun with their initial version, ended once, found again when nobody works on them."""

import time

from sqlalchemy import insert, select, text, update

from broker_server.store import schema
from broker_server.store.database import Database
from broker_server.store.records import RunRecord, VersionRecord
from broker_server.store.rows import to_row

UNFINISHED = ("running", "paused")

# By the order in which they came: a clock may have been ahead.
_NEWEST_FIRST = text("rowid DESC")


class RunTable(Database):
    """The runs of a store."""

    def add_run(self, run: RunRecord, first: VersionRecord) -> None:
        """Begin a run with its initial version."""
        with self._begin() as connection:
            connection.execute(insert(schema.runs).values(to_row(run)))
            connection.execute(insert(schema.versions).values(to_row(first)))

    def end_run(self, run: str, status: str, detail: str | None) -> None:
        """Say how a run ended."""
        self._set_run(run, status=status, detail=detail, ended_at=time.time())

    def set_status(self, run: str, status: str) -> None:
        """Say that a run which has not ended is held, or goes on."""
        self._set_run(run, status=status)

    def add_bytes(self, run: str, *, wire: int, payload: int) -> None:
        """Add to a run's totals."""
        known = schema.runs.c
        self._set_run(run, wire_bytes=known.wire_bytes + wire, payload_bytes=known.payload_bytes + payload)

    def _set_run(self, run: str, **values: object) -> None:
        self._write(update(schema.runs).where(schema.runs.c.id == run).values(**values))

    def runs(self) -> list[RunRecord]:
        """Every run, newest first."""
        return self._all(RunRecord, select(schema.runs).order_by(_NEWEST_FIRST))

    def run(self, run: str) -> RunRecord | None:
        """One run."""
        return self._first(RunRecord, select(schema.runs).where(schema.runs.c.id == run))

    def unfinished(self, fleet: str) -> RunRecord | None:
        """The newest run of a fleet that has not ended."""
        table = schema.runs
        query = select(table).where(table.c.fleet == fleet, table.c.status.in_(UNFINISHED))
        return self._first(RunRecord, query.order_by(_NEWEST_FIRST))
