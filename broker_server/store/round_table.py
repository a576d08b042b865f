"""The rounds of a store, stored with their tasks, which change only as the table of states allows.

See `broker_server.store.machine` for that table.
"""

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Select, insert, select, update

from broker_server.store import schema
from broker_server.store.database import Database
from broker_server.store.machine import FINAL, RoundEvent, RoundState, advance
from broker_server.store.records import RoundRecord
from broker_server.store.rows import from_row, to_row
from broker_server.store.task_records import TaskPhase, TaskRecord
from fleet_protocol.control import VersionEvaluation

_ROUNDS = schema.rounds


class RoundTable(Database):
    """The rounds of a store."""

    def plan_round(
        self,
        record: RoundRecord,
        tasks: Sequence[TaskRecord],
    ) -> None:
        """Store a planned round with all its tasks."""
        # In one transaction: a round without its tasks could not be resumed.
        with self._begin() as connection:
            connection.execute(insert(_ROUNDS).values(to_row(record)))
            if tasks:
                connection.execute(insert(schema.tasks), [to_row(task) for task in tasks])

    def rounds(
        self,
        run: str,
        *,
        last: int | None = None,
    ) -> list[RoundRecord]:
        """Return the rounds of a run in order: all, or only the newest."""
        # Newest first for the limit; the result is turned round.
        return self._all(RoundRecord, _newest_first(run).limit(last))[::-1]

    def last_round(self, run: str) -> RoundRecord | None:
        """Return the newest round of a run."""
        return self._first(RoundRecord, _newest_first(run))

    def advance_round(  # noqa: PLR0913  (options by keyword)
        self,
        record: RoundRecord,
        what: RoundEvent,
        *,
        reason: str | None = None,
        evaluation: VersionEvaluation | None = None,
        note: str | None = None,
        collect_seconds: float | None = None,
        waits: bool = False,
    ) -> RoundRecord:
        """Change a round's state according to the table, and commit it.

        Args:
            record: the round before the change.
            what: the event.
            reason: why it is abandoned.
            evaluation: evaluation of the version that it made.
            note: why that was not evaluated.
            collect_seconds: see `RoundRecord`.
            waits: unanswered tasks stay open, because their updates count later.

        Returns:
            The round after the event.

        Raises:
            RoundTransitionError: the event is not possible in its state.
        """
        state = advance(record.state, what)
        values: dict[str, Any] = {"state": state.value}
        if state is RoundState.OPEN:
            values["opened_at"] = time.time()
        # The event that ended the collection, as the page shows it.
        if state is RoundState.MERGING:
            values["ending"] = what.value
        if collect_seconds is not None:
            values["collect_seconds"] = collect_seconds
        if state in FINAL:
            values["ended_at"] = time.time()
            values["reason"] = reason
            values["evaluation"] = _encoded(evaluation)
            values["note"] = note
        stops_collecting = state in {RoundState.MERGING, RoundState.ABANDONED}
        # A round with a buffer leaves unanswered tasks open.
        return self._commit_round(record, values, close_tasks=stops_collecting and not waits)

    def _commit_round(
        self,
        record: RoundRecord,
        values: dict[str, Any],
        *,
        close_tasks: bool,
    ) -> RoundRecord:
        """Write some values of a round; with `close_tasks` its open tasks become missed."""
        is_round = (_ROUNDS.c.run == record.run) & (_ROUNDS.c.number == record.number)
        tasks = schema.tasks
        in_round = (tasks.c.run == record.run) & (tasks.c.round == record.number)
        is_open = tasks.c.phase == TaskPhase.OFFERED.value
        with self._begin() as connection:
            connection.execute(update(_ROUNDS).where(is_round).values(values))
            if close_tasks:
                missed = update(tasks).where(in_round & is_open)
                connection.execute(missed.values(phase=TaskPhase.MISSED.value))
            row = connection.execute(select(_ROUNDS).where(is_round)).one()
        return from_row(RoundRecord, row)

    def has_whole_round(self, run: str, seconds: float) -> bool:
        """Return whether a round of a run has collected for a number of seconds."""
        is_whole = (_ROUNDS.c.run == run) & (_ROUNDS.c.collect_seconds >= seconds)
        query = select(_ROUNDS.c.number).where(is_whole).limit(1)
        with self._begin() as connection:
            return connection.execute(query).first() is not None


def _newest_first(run: str) -> Select[Any]:
    return select(_ROUNDS).where(_ROUNDS.c.run == run).order_by(_ROUNDS.c.number.desc())


def _encoded(evaluation: VersionEvaluation | None) -> str | None:
    return evaluation.model_dump_json() if evaluation is not None else None
