"""Rounds in the store: planned with their tasks, moved by the table of `broker_server.store.machine` alone."""

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import insert, select, update

from broker_server.store import schema
from broker_server.store.database import Database
from broker_server.store.machine import RoundEvent, RoundState, advance
from broker_server.store.records import RoundRecord
from broker_server.store.rows import from_row, to_row
from broker_server.store.task_records import TaskPhase, TaskRecord
from fleet_protocol.control import VersionEvaluation


class RoundTable(Database):
    """The rounds of a store."""

    def plan_round(self, record: RoundRecord, tasks: Sequence[TaskRecord]) -> None:
        """Store a planned round with all its tasks."""
        with self._begin() as connection:
            connection.execute(insert(schema.rounds).values(to_row(record)))
            if tasks:
                connection.execute(insert(schema.tasks), [to_row(task) for task in tasks])

    def rounds(self, run: str, *, last: int | None = None) -> list[RoundRecord]:
        """The rounds of a run in order, or the last so many."""
        table = schema.rounds
        query = select(table).where(table.c.run == run).order_by(table.c.number.desc())
        return self._all(RoundRecord, query.limit(last))[::-1]

    def last_round(self, run: str) -> RoundRecord | None:
        """The newest round of a run."""
        table = schema.rounds
        return self._first(RoundRecord, select(table).where(table.c.run == run).order_by(table.c.number.desc()))

    def advance_round(
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
        """Move a round by its table and commit it with what is said of its end; or it `waits` for what has not come.

        An event that its state does not know is a RoundTransitionError.
        """
        state = advance(record.state, what)
        values: dict[str, Any] = {"state": state.value}
        if state is RoundState.OPEN:
            values["opened_at"] = time.time()
        if state is RoundState.MERGING:
            values["ending"] = what.value
        if collect_seconds is not None:
            values["collect_seconds"] = collect_seconds
        if state in {RoundState.CLOSED, RoundState.ABANDONED}:
            encoded = evaluation.model_dump_json() if evaluation is not None else None
            values |= {"ended_at": time.time(), "reason": reason, "evaluation": encoded, "note": note}
        tasks, table = schema.tasks, schema.rounds
        of_round = (tasks.c.run == record.run) & (tasks.c.round == record.number)
        with self._begin() as connection:
            connection.execute(
                update(table).where(table.c.run == record.run, table.c.number == record.number).values(values)
            )
            if state in {RoundState.MERGING, RoundState.ABANDONED} and not waits:
                # Nothing is taken any more: what has not come is missed.
                connection.execute(
                    update(tasks)
                    .where(of_round & (tasks.c.phase == TaskPhase.OFFERED.value))
                    .values(phase=TaskPhase.MISSED.value)
                )
            row = connection.execute(
                select(table).where(table.c.run == record.run, table.c.number == record.number)
            ).one()
        return from_row(RoundRecord, row)
