"""The log of a store, and how often messages were refused.

Both are on disk after the next commit.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import func, insert, select
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from broker_server.store import schema
from broker_server.store.database import Database
from broker_server.store.records import EventRecord, RefusalRecord
from fleet_protocol.errors import RefusalReason, single_line

_EVENTS = schema.events
_REFUSALS = schema.refusals
_ADD_LINE = insert(_EVENTS)
_ADD_REFUSAL = sqlite_insert(_REFUSALS)
_COUNT_REFUSAL = _ADD_REFUSAL.on_conflict_do_update(
    index_elements=["run", "device", "reason", "by"],
    set_={"count": _REFUSALS.c.count + _ADD_REFUSAL.excluded.count},
)


@dataclass(frozen=True)
class LineFilter:
    """A filter for lines of a log.

    Attributes:
        kinds: only lines of these kinds; if empty, of all kinds.
        without: no lines of these kinds.
        device: only lines about this device; if empty, about any.
    """

    kinds: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    device: str = ""


EVERY_LINE = LineFilter()


class EventTable(Database):
    """The log of a store, and its counts of refusals."""

    def log(
        self,
        kind: str,
        detail: str,
        *,
        run: str | None = None,
        number: int | None = None,
        device: str | None = None,
    ) -> None:
        """Write a line of the log.

        Args:
            kind: see `EventRecord`.
            detail: the line, in words.
            run: id of the run.
            number: number of the round.
            device: id of the device.
        """
        # Devices choose some of the words: no control character may reach a terminal.
        row = {
            "at": time.time(),
            "run": run,
            "round": number,
            "device": device and single_line(device),
            "kind": kind,
            "detail": single_line(detail),
        }
        # Written with the next commit: a line must not cost one.
        self._later(_ADD_LINE, row)

    def count_refusal(
        self,
        run: str,
        device: str,
        reason: RefusalReason,
        by: str,
        times: int = 1,
    ) -> None:
        """Count refusals.

        Args:
            run: id of the run; empty outside a run.
            device: id of the device; empty if unknown.
            reason: why it was refused.
            by: ``server`` or ``device``.
            times: how many refusals.
        """
        row = {"run": run, "device": device, "reason": reason.value, "by": by, "count": times}
        self._later(_COUNT_REFUSAL, row)

    def events(
        self,
        run: str | None = None,
        *,
        last: int | None = None,
        after: int = 0,
        matching: LineFilter = EVERY_LINE,
    ) -> list[EventRecord]:
        """Return lines of the log, oldest first.

        Args:
            run: id of the run; None for all lines, including those outside runs.
            last: only this many of the newest lines.
            after: only lines after the one with this id.
            matching: only lines that pass this filter.
        """
        # Lines that wait for a commit belong to the answer.
        self.flush()
        # Newest first for the limit; the result is turned round.
        query = select(_EVENTS).where(_EVENTS.c.id > after).order_by(_EVENTS.c.id.desc())
        if run is not None:
            query = query.where(_EVENTS.c.run == run)
        if matching.kinds:
            query = query.where(_EVENTS.c.kind.in_(matching.kinds))
        if matching.without:
            query = query.where(_EVENTS.c.kind.not_in(matching.without))
        if matching.device:
            query = query.where(_EVENTS.c.device == matching.device)
        return self._all(EventRecord, query.limit(last))[::-1]

    def marked_rounds(
        self,
        run: str,
        kind: str,
    ) -> dict[str | None, int]:
        """Return the round of the newest line of one kind, by device."""
        self.flush()
        query = select(_EVENTS.c.device, _EVENTS.c.round).where(
            _EVENTS.c.run == run, _EVENTS.c.kind == kind
        )
        # In order of ids, so that the newest line of each device wins.
        rows = self._values(EventRecord, ("device", "round"), query.order_by(_EVENTS.c.id))
        return {device: number or 0 for device, number in rows}

    def count_lines(
        self,
        run: str,
        kinds: Collection[str],
    ) -> dict[str, int]:
        """Return how many lines a run has of each of these kinds."""
        self.flush()
        query = select(_EVENTS.c.kind, func.count())
        query = query.where(_EVENTS.c.run == run, _EVENTS.c.kind.in_(kinds))
        return dict(self._rows(query.group_by(_EVENTS.c.kind)))

    def count_lines_by_round(self, run: str, kind: str) -> dict[int, int]:
        """Return how many lines of one kind name each round of a run."""
        self.flush()
        query = select(_EVENTS.c.round, func.count())
        query = query.where(_EVENTS.c.run == run, _EVENTS.c.kind == kind)
        counts = self._rows(query.group_by(_EVENTS.c.round))
        # A line outside rounds counts as round 0.
        return {number or 0: count for number, count in counts}

    def refusals(self, run: str | None = None) -> list[RefusalRecord]:
        """Return how often messages were refused, in one run or in all."""
        self.flush()
        query = select(_REFUSALS)
        if run is not None:
            query = query.where(_REFUSALS.c.run == run)
        ordered = query.order_by(_REFUSALS.c.run, _REFUSALS.c.device, _REFUSALS.c.reason)
        return self._all(RefusalRecord, ordered)
