"""Global versions in the store: each stored with the tasks that are merged in it, and judged afterwards."""

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import bindparam, insert, select, update

from broker_server.store import schema
from broker_server.store.database import Database
from broker_server.store.records import VersionRecord
from broker_server.store.rows import to_row
from broker_server.store.task_records import Outcome
from broker_server.store.task_table import OF_TASK
from fleet_protocol.control import VersionEvaluation

_SETTLE = OF_TASK.values({name: bindparam(name) for name in ("phase", "detail", "screening")})


def _settled(outcomes: Mapping[str, Outcome]) -> list[dict[str, Any]]:
    return [
        {"task": task, "phase": item.phase.value, "detail": item.detail, "screening": item.screening.model_dump_json()}
        for task, item in outcomes.items()
    ]


class VersionTable(Database):
    """The global versions of a store."""

    def add_version(self, version: VersionRecord, outcomes: Mapping[str, Outcome]) -> None:
        """Store a new global version and, with it, what became of the updates of its round, by task."""
        with self._begin() as connection:
            connection.execute(insert(schema.versions).values(to_row(version)))
            if outcomes:
                connection.execute(_SETTLE, _settled(outcomes))

    def repeat_version(self, copy: VersionRecord) -> bool:
        """Store a version that repeats an earlier one; False, and nothing stored, while its run is going on."""
        table = schema.runs
        going = select(table.c.id).where(table.c.id == copy.run, table.c.status == "running")
        with self._begin() as connection:
            free = connection.execute(going).first() is None
            if free:
                connection.execute(insert(schema.versions).values(to_row(copy)))
        return free

    def settle_outcomes(self, outcomes: Mapping[str, Outcome]) -> None:
        """Store what became of updates of a round that has no version, by task."""
        self._write(_SETTLE, _settled(outcomes))

    def judge_version(
        self, run: str, number: int, *, statistics: str | None = None, evaluation: VersionEvaluation | None = None
    ) -> None:
        """Add the digest of its statistics, or its evaluation, to a version."""
        values: dict[str, Any] = {}
        if statistics is not None:
            values["statistics_digest"] = statistics
        if evaluation is not None:
            values["evaluation"] = evaluation.model_dump_json()
        table = schema.versions
        self._write(update(table).where(table.c.run == run, table.c.number == number).values(values))

    def judge_closed(self, version: VersionRecord, evaluation: VersionEvaluation | None, note: str | None) -> None:
        """Add to a version and to its closed round, at once, what was found about it, or why nothing was."""
        encoded = evaluation.model_dump_json() if evaluation is not None else None
        versions, rounds = schema.versions, schema.rounds
        mine = update(versions).where(versions.c.run == version.run, versions.c.number == version.number)
        its = update(rounds).where(rounds.c.run == version.run, rounds.c.number == version.round)
        with self._begin() as connection:
            connection.execute(mine.values(evaluation=encoded))
            connection.execute(its.values(evaluation=encoded, note=note))

    def used(self, digests: Collection[str], *, beside: str = "") -> set[str]:
        """Which blobs are the weights of versions, of all runs beside one: the same weights are one blob."""
        table = schema.versions
        query = select(table.c.digest).where(table.c.run != beside, table.c.digest.in_(digests))
        return {digest for (digest,) in self._rows(query)}

    def versions(self, run: str, *, last: int | None = None) -> list[VersionRecord]:
        """The global versions of a run in order, or the last so many."""
        table = schema.versions
        query = select(table).where(table.c.run == run).order_by(table.c.number.desc())
        return self._all(VersionRecord, query.limit(last))[::-1]

    def version(self, run: str, number: int | None = None) -> VersionRecord | None:
        """One global version, by default the newest."""
        table = schema.versions
        query = select(table).where(table.c.run == run).order_by(table.c.number.desc())
        return self._first(VersionRecord, query if number is None else query.where(table.c.number == number))
