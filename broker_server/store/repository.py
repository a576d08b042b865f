"""Reading and writing the store; every method is one transaction and returns frozen records."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel
from sqlalchemy import Connection, Engine, Row, Select, create_engine, event, insert, select, text, update
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.exc import SQLAlchemyError

from broker_server.machine import RoundEvent, RoundState, advance
from broker_server.store import schema
from broker_server.store.records import (
    Alternatives,
    DeviceRecord,
    EventRecord,
    RefusalRecord,
    RoundRecord,
    RunRecord,
    TaskPhase,
    TaskRecord,
    VersionRecord,
)
from fleet_protocol.control import VersionEvaluation
from fleet_protocol.errors import RefusalReason, StorageError
from fleet_protocol.messages import BlobRef, DeviceStatus, Profile, TaskMetrics

__all__ = ["Store"]

RecordT = TypeVar("RecordT")

_PARSED: dict[str, type[BaseModel]] = {
    "profile": Profile,
    "evaluation": VersionEvaluation,
    "metrics": TaskMetrics,
    "artifact_set": BlobRef,
    "weights": BlobRef,
    "others": Alternatives,
}
_ENUMS: dict[type, dict[str, type[RoundState | TaskPhase]]] = {
    RoundRecord: {"state": RoundState},
    TaskRecord: {"phase": TaskPhase},
}


def _record(kind: type[RecordT], row: Row[Any]) -> RecordT:
    values: dict[str, Any] = {}
    enums = _ENUMS.get(kind, {})
    for name in (item.name for item in fields(kind)):  # type: ignore[arg-type]  # every record is a dataclass
        value = row._mapping[name]  # noqa: SLF001  (SQLAlchemy's public access by name)
        if value is not None and name in _PARSED:
            value = _PARSED[name].model_validate_json(value)
        elif name in enums:
            value = enums[name](value)
        values[name] = value
    return kind(**values)


def _plain(record: object) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for item in fields(record):  # type: ignore[arg-type]  # every record is a dataclass
        value = getattr(record, item.name)
        if isinstance(value, BaseModel):
            value = value.model_dump_json()
        elif isinstance(value, (RoundState, TaskPhase)):
            value = value.value
        values[item.name] = value
    return values


class Store:
    """The database of a fleet.

    Args:
        folder: holds ``shoal.db`` and, beside it, the blobs; it is made.
        read_only: refuse to make a store where there is none.

    Raises:
        StorageError: the folder cannot be used, or was written by a newer version of Shoal.
    """

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        self.folder = folder
        self.path = folder / "shoal.db"
        if read_only and not self.path.is_file():
            raise StorageError(f"there is no store in {folder}; `shoal run` or `shoal up` makes one")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._engine = _open(self.path)
            self._check_version()
        except (OSError, SQLAlchemyError) as error:
            raise StorageError(f"cannot open the store {self.path}: {error}") from error

    def _check_version(self) -> None:
        with self._engine.begin() as connection:
            schema.metadata.create_all(connection)
            found = connection.execute(select(schema.stamp.c.schema_version)).scalar()
            if found is None:
                connection.execute(insert(schema.stamp).values(schema_version=schema.SCHEMA_VERSION))
            elif found > schema.SCHEMA_VERSION:
                raise StorageError(
                    f"the store {self.path} has schema version {found}, this Shoal reads up to "
                    f"{schema.SCHEMA_VERSION}; use the newer version that wrote it, or another store folder"
                )
            elif found < schema.SCHEMA_VERSION:
                connection.execute(text("ALTER TABLE tasks ADD COLUMN others TEXT"))
                connection.execute(update(schema.stamp).values(schema_version=schema.SCHEMA_VERSION))

    @contextmanager
    def _begin(self) -> Iterator[Connection]:
        try:
            with self._engine.begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise StorageError(f"cannot use the store {self.path}: {error}") from error

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()

    def _all(self, kind: type[RecordT], query: Select[Any]) -> list[RecordT]:
        with self._begin() as connection:
            return [_record(kind, row) for row in connection.execute(query)]

    def _first(self, kind: type[RecordT], query: Select[Any]) -> RecordT | None:
        found = self._all(kind, query.limit(1))
        return found[0] if found else None

    # Runs.

    def add_run(self, run: RunRecord, first: VersionRecord) -> None:
        """Begin a run with its initial version."""
        with self._begin() as connection:
            connection.execute(insert(schema.runs).values(_plain(run)))
            connection.execute(insert(schema.versions).values(_plain(first)))

    def end_run(self, run: str, status: str, detail: str | None) -> None:
        """Say how a run ended."""
        with self._begin() as connection:
            connection.execute(
                update(schema.runs)
                .where(schema.runs.c.id == run)
                .values(status=status, detail=detail, ended_at=time.time())
            )

    def add_bytes(self, run: str, *, wire: int, payload: int) -> None:
        """Add to a run's totals."""
        table = schema.runs
        with self._begin() as connection:
            connection.execute(
                update(table)
                .where(table.c.id == run)
                .values(wire_bytes=table.c.wire_bytes + wire, payload_bytes=table.c.payload_bytes + payload)
            )

    def runs(self) -> list[RunRecord]:
        """Every run, newest first."""
        return self._all(RunRecord, select(schema.runs).order_by(schema.runs.c.created_at.desc()))

    def run(self, run: str) -> RunRecord | None:
        """One run."""
        return self._first(RunRecord, select(schema.runs).where(schema.runs.c.id == run))

    def unfinished(self, fleet: str) -> RunRecord | None:
        """The newest run of a fleet that has not ended."""
        table = schema.runs
        return self._first(
            RunRecord,
            select(table)
            .where(table.c.fleet == fleet, table.c.status == "running")
            .order_by(table.c.created_at.desc()),
        )

    # Devices.

    def see_device(self, status: DeviceStatus) -> None:
        """Remember what a device said about itself; its profile stays when it says nothing new."""
        now = time.time()
        seen = {"online": status.online, "state": status.state, "last_seen_at": now}
        if status.profile is not None:
            seen["profile"] = status.profile.model_dump_json()
        given = sqlite_insert(schema.devices).values(
            {"profile": None, "first_seen_at": now, "fleet": status.fleet, "id": status.device} | seen
        )
        with self._begin() as connection:
            connection.execute(given.on_conflict_do_update(index_elements=["fleet", "id"], set_=seen))

    def devices(self, fleet: str | None = None) -> list[DeviceRecord]:
        """Every device that was ever seen, by id."""
        query = select(schema.devices).order_by(schema.devices.c.id)
        return self._all(DeviceRecord, query if fleet is None else query.where(schema.devices.c.fleet == fleet))

    # Rounds and tasks.

    def plan_round(self, record: RoundRecord, tasks: Sequence[TaskRecord]) -> None:
        """Store a planned round with all its tasks."""
        with self._begin() as connection:
            connection.execute(insert(schema.rounds).values(_plain(record)))
            connection.execute(insert(schema.tasks), [_plain(task) for task in tasks])

    def add_tasks(self, tasks: Sequence[TaskRecord]) -> None:
        """Store further tasks of a round."""
        with self._begin() as connection:
            connection.execute(insert(schema.tasks), [_plain(task) for task in tasks])

    def rounds(self, run: str) -> list[RoundRecord]:
        """The rounds of a run in order."""
        table = schema.rounds
        return self._all(RoundRecord, select(table).where(table.c.run == run).order_by(table.c.number))

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
    ) -> RoundRecord:
        """Move a round by its table and commit.

        Args:
            record: the round as it is.
            what: the event.
            reason: why it is abandoned.
            evaluation: of the version it made.
            note: why that was not evaluated.

        Returns:
            The round as it is now.

        Raises:
            RoundTransitionError: its state knows no such event.
        """
        state = advance(record.state, what)
        values: dict[str, Any] = {"state": state.value}
        if state is RoundState.OPEN:
            values["opened_at"] = time.time()
        if state in {RoundState.CLOSED, RoundState.ABANDONED}:
            encoded = evaluation.model_dump_json() if evaluation is not None else None
            values |= {"ended_at": time.time(), "reason": reason, "evaluation": encoded, "note": note}
        tasks, table = schema.tasks, schema.rounds
        of_round = (tasks.c.run == record.run) & (tasks.c.round == record.number)
        with self._begin() as connection:
            connection.execute(
                update(table).where(table.c.run == record.run, table.c.number == record.number).values(values)
            )
            if state in {RoundState.MERGING, RoundState.ABANDONED}:
                # Nothing is taken any more: what has not come is missed.
                connection.execute(
                    update(tasks)
                    .where(of_round & (tasks.c.phase == TaskPhase.OFFERED.value))
                    .values(phase=TaskPhase.MISSED.value)
                )
            row = connection.execute(
                select(table).where(table.c.run == record.run, table.c.number == record.number)
            ).one()
        return _record(RoundRecord, row)

    def tasks(self, run: str, number: int, kind: str | None = None) -> list[TaskRecord]:
        """The tasks of a round, by device."""
        table = schema.tasks
        query = select(table).where(table.c.run == run, table.c.round == number).order_by(table.c.device)
        return self._all(TaskRecord, query if kind is None else query.where(table.c.kind == kind))

    def task(self, task: str) -> TaskRecord | None:
        """One task, of whatever run."""
        return self._first(TaskRecord, select(schema.tasks).where(schema.tasks.c.id == task))

    def receive(self, task: str, digest: str, size: int, metrics: TaskMetrics) -> None:
        """Commit that an update is on disk; only then may it be acknowledged."""
        self._set_task(
            task,
            phase=TaskPhase.RECEIVED.value,
            update_digest=digest,
            update_size=size,
            metrics=metrics.model_dump_json(),
            received_at=time.time(),
        )

    def take(self, task: TaskRecord) -> None:
        """Commit which of its sub-models a device took."""
        values = _plain(task)
        self._set_task(
            task.id, **{key: values[key] for key in ("tier", "plan_key", "artifact_set", "weights", "others")}
        )

    def settle(self, tasks: Iterable[str], phase: TaskPhase, detail: str | None = None) -> None:
        """Put tasks into a phase."""
        with self._begin() as connection:
            for task in tasks:
                connection.execute(
                    update(schema.tasks).where(schema.tasks.c.id == task).values(phase=phase.value, detail=detail)
                )

    def _set_task(self, task: str, **values: object) -> None:
        with self._begin() as connection:
            connection.execute(update(schema.tasks).where(schema.tasks.c.id == task).values(**values))

    # Versions.

    def add_version(self, version: VersionRecord, merged: Iterable[str]) -> None:
        """Store a new global version and, with it, that these tasks are in it."""
        with self._begin() as connection:
            connection.execute(insert(schema.versions).values(_plain(version)))
            for task in merged:
                connection.execute(
                    update(schema.tasks).where(schema.tasks.c.id == task).values(phase=TaskPhase.MERGED.value)
                )

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
        with self._begin() as connection:
            connection.execute(update(table).where(table.c.run == run, table.c.number == number).values(values))

    def versions(self, run: str) -> list[VersionRecord]:
        """The global versions of a run in order."""
        table = schema.versions
        return self._all(VersionRecord, select(table).where(table.c.run == run).order_by(table.c.number))

    def version(self, run: str, number: int | None = None) -> VersionRecord | None:
        """One global version, by default the newest."""
        table = schema.versions
        query = select(table).where(table.c.run == run).order_by(table.c.number.desc())
        return self._first(VersionRecord, query if number is None else query.where(table.c.number == number))

    # The log.

    def log(
        self, kind: str, detail: str, *, run: str | None = None, number: int | None = None, device: str | None = None
    ) -> None:
        """Write a line of the log."""
        with self._begin() as connection:
            connection.execute(
                insert(schema.events).values(
                    at=time.time(), run=run, round=number, device=device, kind=kind, detail=detail
                )
            )

    def count_refusal(self, run: str, device: str, reason: RefusalReason, by: str, times: int = 1) -> None:
        """Count refusals.

        Args:
            run: id of the run, empty outside one.
            device: id, empty where it is not known.
            reason: why.
            by: ``server`` or ``device``.
            times: how many.
        """
        table = schema.refusals
        given = sqlite_insert(table).values(run=run, device=device, reason=reason.value, by=by, count=times)
        with self._begin() as connection:
            connection.execute(
                given.on_conflict_do_update(
                    index_elements=["run", "device", "reason", "by"], set_={"count": table.c.count + times}
                )
            )

    def events(self, run: str | None = None, *, last: int | None = None) -> list[EventRecord]:
        """Lines of the log, oldest first.

        Args:
            run: of one run only.
            last: only so many of the newest.
        """
        query = select(schema.events).order_by(schema.events.c.id.desc())
        if run is not None:
            query = query.where(schema.events.c.run == run)
        return self._all(EventRecord, query if last is None else query.limit(last))[::-1]

    def refusals(self, run: str | None = None) -> list[RefusalRecord]:
        """How often what was refused."""
        table = schema.refusals
        query = select(table).order_by(table.c.run, table.c.device, table.c.reason)
        return self._all(RefusalRecord, query if run is None else query.where(table.c.run == run))


def _open(path: Path) -> Engine:
    engine = create_engine(f"sqlite:///{path}")

    @event.listens_for(engine, "connect")
    def _settings(connection: Any, _record: object) -> None:
        cursor = connection.cursor()
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            cursor.execute("PRAGMA synchronous=FULL")
            cursor.execute("PRAGMA busy_timeout=10000")
        finally:
            cursor.close()

    return engine
