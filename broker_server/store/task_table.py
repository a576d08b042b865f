"""The database of a store, and its tasks: what each device was asked in a round, and what came of
it.

What may be lost with a killed server (who was there, lines of the log, counts) waits in memory and
is written with the next commit, or by `Database.flush` now and then: a commit waits for the disk,
and a fleet says much at once.
"""

import logging
import math
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import (
    ColumnElement,
    Connection,
    Executable,
    Float,
    Integer,
    Select,
    bindparam,
    cast,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.exc import SQLAlchemyError

from broker_server.store import schema
from broker_server.store.opening import database_message, open_for_reading, open_for_writing
from broker_server.store.records import RoundRecord
from broker_server.store.rows import (
    TABLES,
    DamagedRowError,
    damaged_row,
    from_row,
    to_row,
    values_of,
)
from broker_server.store.task_records import (
    DevicePart,
    PlannedTask,
    TaskPhase,
    TaskRecord,
    Timing,
)
from fleet_protocol.errors import StorageError
from fleet_protocol.foreign_files import quoted

OF_TASK = update(schema.tasks).where(schema.tasks.c.id == bindparam("task"))
_RECEIVE = OF_TASK.values(
    {
        name: bindparam(name)
        for name in ("phase", "update_digest", "update_size", "metrics", "received_at")
    }
)
_SETTLE = OF_TASK.values({name: bindparam(name) for name in ("phase", "detail")})
_NOTE_ANSWER = OF_TASK.values(timing=bindparam("timing"))
Answer = tuple[str, TaskPhase, str | None]
RecordT = TypeVar("RecordT")

_LOG = logging.getLogger(__name__)
_MALFORMED = "malformed JSON"  # as SQLite says it
_READ_AT_ONCE = 256  # rows, which may be large
_MOST_WAITING = 4096  # rows of one kind; a flood must not fill the memory


class Database:
    """What the tables of a store share.

    Args:
        folder: holds ``shoal.db`` and, beside it, the blobs; it is made.
        read_only: write nothing, neither into the folder nor into the database, and refuse to make
            a store where there is none. A store of an older version is read as it would be once it
            is upgraded.
        durable: let a commit wait for the disk; else a power cut may take the last ones, but a
            killed process none.

    Raises:
        StorageError: the folder cannot be used, or was written by a newer version of Shoal.
    """

    def __init__(self, folder: Path, *, read_only: bool = False, durable: bool = True) -> None:
        self.folder = folder
        self.path = folder / "shoal.db"
        self._read_only = read_only
        self._engine = (
            open_for_reading(self.path)
            if read_only
            else open_for_writing(self.path, durable=durable)
        )
        self._waiting: dict[Executable, dict[Hashable, Mapping[str, Any]]] = {}

    def close(self) -> None:
        """Write what waits, and close every connection.

        A StorageError where that cannot be written.
        """
        try:
            self.flush()
        finally:
            self._engine.dispose()

    def flush(self) -> None:
        """Commit what waits; a StorageError where the disk is full or cannot be written."""
        if self._waiting:
            with self._begin():
                pass

    @contextmanager
    def _begin(self) -> Iterator[Connection]:
        """A transaction that writes, with it what waits."""
        with self._transaction() as connection:
            for statement, rows in self._waiting.items():
                connection.execute(statement, list(rows.values()))
            yield connection
        self._waiting.clear()

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        try:
            with self._engine.begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            if _MALFORMED in database_message(error):
                self._name_malformed()
            raise StorageError(
                f"cannot use the store {self.path}: {database_message(error)}"
            ) from error

    def _name_malformed(self) -> None:
        """Name the task whose JSON the database itself could not read.

        Nothing where there is none.
        """
        table = schema.tasks
        with suppress(SQLAlchemyError), self._engine.begin() as connection:
            for column in (table.c.metrics, table.c.screening):
                query = select(table.c.id).where(column.is_not(None), func.json_valid(column) == 0)
                task = connection.execute(query.limit(1)).scalar()
                if task is not None:
                    raise damaged_row(
                        table.name,
                        f"id {quoted(str(task))}",
                        column.name,
                        "it is no JSON",
                    )

    def _write(
        self, statement: Executable, rows: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Commit a statement, or the same for each of some rows.

        Of none there is nothing to commit.
        """
        if rows is None or rows:
            with self._begin() as connection:
                connection.execute(statement, rows)

    def _later(
        self, statement: Executable, row: Mapping[str, Any], key: Hashable | None = None
    ) -> None:
        """Let a row wait for the next commit, with one of few statements, the same object every
        time.

        A row takes the place of one that still waits with the same key. A StorageError says that so
        many wait that they are written now, and cannot be; or that the store is read only.
        """
        if self._read_only:
            raise StorageError(f"the store {self.path} was opened readonly: nothing can be written")
        rows = self._waiting.setdefault(statement, {})
        if key is None:
            key = len(rows)
        rows.pop(key, None)  # the newest is written last
        rows[key] = row
        if len(rows) >= _MOST_WAITING:
            self.flush()

    def _rows(self, query: Select[Any]) -> Sequence[Any]:
        with self._transaction() as connection:
            return connection.execute(query).all()

    def _values(self, kind: type, names: Sequence[str], query: Select[Any]) -> Iterator[list[Any]]:
        """Rows of a query for some fields of a kind of record, each value checked."""
        return (values_of(kind, names, row) for row in self._rows(query))

    def _all(self, kind: type[RecordT], query: Select[Any]) -> list[RecordT]:
        with self._transaction() as connection:
            return [from_row(kind, row) for row in connection.execute(query)]

    def _readable(self, kind: type[RecordT], query: Select[Any]) -> list[RecordT]:
        """The records of a query without those that cannot be read, which a warning names."""
        records = []
        for row in self._rows(query):
            try:
                records.append(from_row(kind, row))
            except DamagedRowError as error:
                _LOG.warning("a row is left out: %s", error)
        return records

    def check_rows(self) -> None:
        """Read every row of every table, one after the other.

        Raises:
            DamagedRowError: one has what no server can have written.
            StorageError: the database cannot be read.
        """
        with self._transaction() as connection:
            for kind, table in TABLES.items():
                for row in connection.execution_options(yield_per=_READ_AT_ONCE).execute(
                    select(table)
                ):
                    from_row(kind, row)

    def _first(self, kind: type[RecordT], query: Select[Any]) -> RecordT | None:
        found = self._all(kind, query.limit(1))
        return found[0] if found else None


def _measured(name: str, kind: type[Float[Any] | Integer]) -> ColumnElement[Any]:
    """A number of a task's measurements.

    A word in its place counts as 0, and does not stay a word.
    """
    return cast(func.json_extract(schema.tasks.c.metrics, f"$.{name}"), kind)


class TaskTable(Database):
    """The tasks of a store."""

    def add_tasks(self, tasks: Sequence[TaskRecord]) -> None:
        """Store further tasks of a round."""
        self._write(insert(schema.tasks), [to_row(task) for task in tasks])

    def tasks(self, run: str, number: int, kind: str | None = None) -> list[TaskRecord]:
        """The tasks of a round, by device."""
        table = schema.tasks
        query = (
            select(table)
            .where(table.c.run == run, table.c.round == number)
            .order_by(table.c.device)
        )
        return self._all(TaskRecord, query if kind is None else query.where(table.c.kind == kind))

    def device_tasks(self, run: str, device: str) -> list[TaskRecord]:
        """The training tasks of a device in a run, by round."""
        table = schema.tasks
        query = select(table).where(
            table.c.run == run, table.c.device == device, table.c.kind == "train"
        )
        return self._all(TaskRecord, query.order_by(table.c.round))

    def answered_since(self, since: Mapping[str, float]) -> list[Answer]:
        """Device, phase and detail of the training tasks of some devices, in rounds planned after a
        time of each.
        """
        table = schema.tasks
        rounds = schema.rounds
        query = select(table.c.device, table.c.phase, table.c.detail, rounds.c.planned_at).where(
            (table.c.run == rounds.c.run)
            & (table.c.round == rounds.c.number)
            & (table.c.kind == "train"),
            rounds.c.planned_at > min(since.values()),
        )
        answers = []
        for row in self._rows(query):
            device, phase, detail = values_of(TaskRecord, ("device", "phase", "detail"), row[:3])
            (planned_at,) = values_of(RoundRecord, ("planned_at",), row[3:])
            if planned_at > since.get(device, math.inf):
                answers.append((device, phase, detail))
        return answers

    def planned_tasks(self, run: str) -> list[PlannedTask]:
        """Every training task of a run, by round."""
        columns = [schema.tasks.c[name] for name in PlannedTask._fields]
        query = select(*columns).where(schema.tasks.c.run == run, schema.tasks.c.kind == "train")
        rows = self._values(TaskRecord, PlannedTask._fields, query.order_by(schema.tasks.c.round))
        return [PlannedTask._make([*values, phase.value]) for *values, phase in rows]

    def device_parts(self, run: str) -> dict[str, DevicePart]:
        """What every device did in a run, by device.

        Summed up by the database, for there may be many tasks.
        """
        table = schema.tasks
        of_run = (table.c.run == run) & (table.c.kind == "train")
        totals = {
            "merged": func.count().filter(table.c.phase == TaskPhase.MERGED.value),
            "missed": func.count().filter(table.c.phase == TaskPhase.MISSED.value),
            "train_seconds": func.avg(_measured("train_seconds", Float)),
            "fetch_seconds": func.avg(_measured("fetch_seconds", Float)),
            "resident_bytes": func.max(_measured("resident_bytes", Integer)),
        }
        query = select(
            table.c.device, *(value.label(name) for name, value in totals.items())
        ).where(of_run)
        newest = self._newest(of_run)
        measured = self._newest(of_run & table.c.metrics.is_not(None))
        rows = self._rows(query.group_by(table.c.device))
        names = {device: dict(zip(totals, found, strict=True)) for device, *found in rows}
        return {
            name: DevicePart(newest[name], measured.get(name), found)
            for name, found in names.items()
        }

    def _newest(self, which: ColumnElement[bool]) -> dict[str, TaskRecord]:
        table = schema.tasks
        newest = (
            select(table.c.device, func.max(table.c.round).label("round"))
            .where(which)
            .group_by(table.c.device)
        )
        found = newest.subquery()
        query = select(table).join(
            found, (table.c.device == found.c.device) & (table.c.round == found.c.round)
        )
        return {task.device: task for task in self._all(TaskRecord, query.where(which))}

    def late_tasks(self, run: str, number: int, *, waiting: bool = False) -> list[TaskRecord]:
        """Training tasks of earlier rounds whose updates are in the version of a round, or still
        may be, by device.
        """
        table = schema.tasks
        wanted = func.json_extract(table.c.screening, "$.round") == number
        if waiting:
            wanted |= table.c.phase.in_([TaskPhase.OFFERED.value, TaskPhase.RECEIVED.value])
        query = select(table).where(
            table.c.run == run, table.c.round < number, table.c.kind == "train", wanted
        )
        return self._all(TaskRecord, query.order_by(table.c.device))

    def refused_devices(self, run: str) -> list[tuple[str, int, TaskPhase]]:
        """Device, round and phase of every training task of devices of which something was refused,
        by round.
        """
        table = schema.tasks
        of_run = (table.c.run == run) & (table.c.kind == "train")
        refused = select(table.c.device).where(of_run & (table.c.phase == TaskPhase.REFUSED.value))
        query = select(table.c.device, table.c.round, table.c.phase)
        query = query.where(of_run & table.c.device.in_(refused)).order_by(table.c.round)
        rows = self._values(TaskRecord, ("device", "round", "phase"), query)
        return [(device, number, phase) for device, number, phase in rows]

    def task(self, task: str) -> TaskRecord | None:
        """One task, of whatever run."""
        return self._first(TaskRecord, select(schema.tasks).where(schema.tasks.c.id == task))

    def receive(self, tasks: Sequence[TaskRecord], *, later: bool = False) -> None:
        """Commit that updates, as of `TaskRecord.with_update`, are on disk, all or none.

        Only then acknowledge them.

        Where nobody is waiting for that, `later` has them wait for the next commit.
        """
        now = time.time()
        rows = [
            {
                "task": task.id,
                "phase": task.phase.value,
                "update_digest": task.update_digest,
                "update_size": task.update_size,
                "metrics": None if task.metrics is None else task.metrics.model_dump_json(),
                "received_at": now,
            }
            for task in tasks
        ]
        if not later:
            self._write(_RECEIVE, rows)
        for row in rows if later else ():
            self._later(_RECEIVE, row, row["task"])

    def choose_tier(self, task: TaskRecord) -> None:
        """Commit which of its sub-models a device took."""
        row = to_row(task)
        taken = {key: row[key] for key in ("tier", "plan_key", "artifact_set", "weights", "others")}
        self._write(update(schema.tasks).where(schema.tasks.c.id == task.id).values(taken))

    def settle(self, tasks: Iterable[str], phase: TaskPhase, detail: str | None = None) -> None:
        """Put tasks into a phase."""
        self._write(
            _SETTLE,
            [{"task": task, "phase": phase.value, "detail": detail} for task in tasks],
        )

    def record_timings(self, timings: Mapping[str, Timing]) -> None:
        """Remember when tasks were answered, by id, with the next commit, which is that of their
        round's end.
        """
        for task, timing in timings.items():
            self._later(_NOTE_ANSWER, {"task": task, "timing": timing.model_dump_json()}, task)
