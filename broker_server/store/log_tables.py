"""The log in the store: what happened, line by line, and how often what was refused."""

import time
from collections.abc import Collection

from sqlalchemy import func, insert, select
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from broker_server.store import schema
from broker_server.store.database import Database
from broker_server.store.records import EventRecord, RefusalRecord
from fleet_protocol.errors import RefusalReason

_LINE = insert(schema.events)
_GIVEN = sqlite_insert(schema.refusals)
_COUNT = _GIVEN.on_conflict_do_update(
    index_elements=["run", "device", "reason", "by"], set_={"count": schema.refusals.c.count + _GIVEN.excluded.count}
)


class LogTables(Database):
    """The log of a store; what is written here is on the disk with the next commit."""

    def log(
        self, kind: str, detail: str, *, run: str | None = None, number: int | None = None, device: str | None = None
    ) -> None:
        """Write a line of the log."""
        self._later(
            _LINE, {"at": time.time(), "run": run, "round": number, "device": device, "kind": kind, "detail": detail}
        )

    def count_refusal(self, run: str, device: str, reason: RefusalReason, by: str, times: int = 1) -> None:
        """Count refusals by ``server`` or ``device``; run and device are empty where there is none."""
        self._later(_COUNT, {"run": run, "device": device, "reason": reason.value, "by": by, "count": times})

    def events(self, run: str | None = None, *, last: int | None = None, after: int = 0) -> list[EventRecord]:
        """Lines of the log, oldest first: of one run, the last so many, those after the one with an id."""
        self.flush()
        query = select(schema.events).where(schema.events.c.id > after).order_by(schema.events.c.id.desc())
        if run is not None:
            query = query.where(schema.events.c.run == run)
        return self._all(EventRecord, query if last is None else query.limit(last))[::-1]

    def newest_marks(self, run: str, kind: str) -> dict[str | None, int]:
        """The round that the newest line of one kind names, by device."""
        self.flush()
        table = schema.events
        query = select(table.c.device, table.c.round).where(table.c.run == run, table.c.kind == kind)
        return {device: number or 0 for device, number in self._rows(query.order_by(table.c.id))}

    def lines(self, run: str, kinds: Collection[str]) -> dict[str, int]:
        """How many lines a run has of each of these kinds."""
        self.flush()
        table = schema.events
        of = table.c.run == run, table.c.kind.in_(kinds)
        return dict(self._rows(select(table.c.kind, func.count()).where(*of).group_by(table.c.kind)))

    def refusals(self, run: str | None = None) -> list[RefusalRecord]:
        """How often what was refused."""
        self.flush()
        table = schema.refusals
        query = select(table).order_by(table.c.run, table.c.device, table.c.reason)
        return self._all(RefusalRecord, query if run is None else query.where(table.c.run == run))
