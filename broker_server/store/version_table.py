"""The global versions of a store: stored with their merged tasks, and evaluated afterwards."""

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import Select, insert, select, update

from broker_server.store import schema
from broker_server.store.records import VersionRecord
from broker_server.store.rows import to_row
from broker_server.store.task_records import Outcome
from broker_server.store.task_table import TaskTable
from fleet_protocol.control import VersionEvaluation

_VERSIONS = schema.versions


class VersionTable(TaskTable):
    """The global versions of a store."""

    def add_version(
        self,
        version: VersionRecord,
        outcomes: Mapping[str, Outcome],
    ) -> None:
        """Store a new global version and, with it, the outcomes of its round's tasks, by id."""
        # In one transaction: a version must not exist without the outcomes of its tasks.
        with self._begin() as connection:
            connection.execute(insert(_VERSIONS).values(to_row(version)))
            self._write_outcomes(connection, outcomes)

    def repeat_version(self, copy: VersionRecord) -> bool:
        """Store a version that repeats an earlier one.

        Returns:
            False, and nothing is stored, while its run is in progress.
        """
        runs = schema.runs
        is_running = select(runs.c.id).where(runs.c.id == copy.run, runs.c.status == "running")
        with self._begin() as connection:
            if connection.execute(is_running).first() is not None:
                # A running server would make a version of the same number.
                return False
            connection.execute(insert(_VERSIONS).values(to_row(copy)))
        return True

    def judge_version(
        self,
        run: str,
        number: int,
        *,
        statistics: str | None = None,
        evaluation: VersionEvaluation | None = None,
    ) -> None:
        """Add the digest of its statistics, or its evaluation, to a version."""
        values: dict[str, Any] = {}
        if statistics is not None:
            values["statistics_digest"] = statistics
        if evaluation is not None:
            values["evaluation"] = evaluation.model_dump_json()
        is_version = (_VERSIONS.c.run == run) & (_VERSIONS.c.number == number)
        self._write(update(_VERSIONS).where(is_version).values(values))

    def judge_closed(
        self,
        version: VersionRecord,
        evaluation: VersionEvaluation | None,
        note: str | None,
    ) -> None:
        """Add an evaluation to a version and to its closed round, in one commit.

        Args:
            version: the version.
            evaluation: None if it was not evaluated.
            note: why it was not.
        """
        encoded = evaluation.model_dump_json() if evaluation is not None else None
        rounds = schema.rounds
        is_version = (_VERSIONS.c.run == version.run) & (_VERSIONS.c.number == version.number)
        is_round = (rounds.c.run == version.run) & (rounds.c.number == version.round)
        # The version and its round show the same evaluation.
        with self._begin() as connection:
            connection.execute(update(_VERSIONS).where(is_version).values(evaluation=encoded))
            closed = update(rounds).where(is_round)
            connection.execute(closed.values(evaluation=encoded, note=note))

    def used_blobs(
        self,
        digests: Collection[str],
        *,
        beside: str = "",
    ) -> set[str]:
        """Return which blobs are the weights of versions.

        Equal weights of several runs are one blob.

        Args:
            digests: the blobs to check.
            beside: id of a run whose versions are ignored.
        """
        query = select(_VERSIONS.c.digest).where(
            _VERSIONS.c.run != beside, _VERSIONS.c.digest.in_(digests)
        )
        return {digest for (digest,) in self._rows(query)}

    def versions(
        self,
        run: str,
        *,
        last: int | None = None,
    ) -> list[VersionRecord]:
        """Return the global versions of a run in order: all, or only the newest."""
        return self._all(VersionRecord, _newest_first(run).limit(last))[::-1]

    def version(
        self,
        run: str,
        number: int | None = None,
    ) -> VersionRecord | None:
        """Return one global version, by default the newest."""
        query = _newest_first(run)
        if number is not None:
            query = query.where(_VERSIONS.c.number == number)
        return self._first(VersionRecord, query)


def _newest_first(run: str) -> Select[Any]:
    return select(_VERSIONS).where(_VERSIONS.c.run == run).order_by(_VERSIONS.c.number.desc())
